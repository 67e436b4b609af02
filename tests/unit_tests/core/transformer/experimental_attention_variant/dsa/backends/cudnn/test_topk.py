"""Selection at its edges: odd and too large k, ties, rows of 0 or 1 key, repeats; long rows in the gpu_long run."""

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, frontend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

from .. import cases
from ..cases import Case
from ..conftest import Stage
from ..test_backends import check_case, select_and_check

BF16 = torch.bfloat16


@pytest.mark.parametrize("k", [1, 63, 64, 65, 257, 705, 1023, 2047, 2048])
@pytest.mark.parametrize("rows", [1, 235])
def test_every_k_on_row_slices(k: int, rows: int, stage: Stage) -> None:
    layout = Layout.causal(1, 300).slice_rows(300 - rows, 300)
    case = Case("packed", "sparse", 16, 32, k, torch.bfloat16)
    select_and_check(CudnnBackend(case.config()), cases.make_inputs(layout, case, stage.device), layout, k)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_k_beyond_the_visible_keys_keeps_its_width(length: int, stage: Stage) -> None:
    layout = Layout.causal(1, length)
    case = Case("packed", "sparse", 16, 32, 64, torch.bfloat16)
    topk = select_and_check(CudnnBackend(case.config()), cases.make_inputs(layout, case, stage.device), layout, 64)
    assert topk.indices_TK.shape == (length, 64)
    assert topk.length_T.tolist() == [min(64, t + 1) for t in range(length)]


def tied(layout: Layout, winners: list[int], device: torch.device) -> IndexerInputs:
    """Every key scores 0 but the winners: the head dots of the others are negative, which ReLU turns to 0."""
    q = torch.ones(layout.num_rows, 32, 128, device=device)
    k = -torch.ones(layout.num_keys, 128, device=device)
    k[winners] = 1.0
    return IndexerInputs(q, k, torch.ones(layout.num_rows, 32, device=device))


@pytest.mark.parametrize("winners", [[], [9, 150, 151]], ids=["all-zero", "three-winners"])
def test_ties_go_to_the_lowest_ids_every_time(winners: list[int], stage: Stage) -> None:
    layout = Layout.causal(1, 200)
    backend = CudnnBackend(cases.make_config())
    topk = backend.select(tied(layout, winners, stage.device), layout, 64)
    for row in (0, 40, 63, 64, 130, 199):
        seen = [w for w in winners if w <= row]
        rest = [i for i in range(row + 1) if i not in seen][: max(64 - len(seen), 0)]
        wanted = sorted(seen + rest)[:64]
        assert topk.indices_TK[row, : len(wanted)].tolist() == wanted
    for _ in range(5 if stage.emulator else 50):
        assert torch.equal(backend.select(tied(layout, winners, stage.device), layout, 64).indices_TK, topk.indices_TK)


def test_validity_is_the_length_and_never_the_score(stage: Stage) -> None:
    """A row of -inf still selects `length` ids, unique and in range."""
    scores = torch.full((7, 100), -torch.inf, device=stage.device)
    scores[1:3, 5] = -1e5
    length = torch.tensor([0, 1, 10, 64, 99, 100, 65], dtype=torch.int32, device=stage.device)
    ids, _ = frontend.top_k(scores, length, 64, False)
    for row, n in enumerate(length.clamp(max=64).tolist()):
        valid = ids[row][ids[row] >= 0].tolist()
        assert len(set(valid)) == n and all(i < length[row] for i in valid)


def test_thousands_of_ties_leave_no_slot_empty(stage: Stage) -> None:
    """100 winners and 8,220 exact zeros; then nothing but zeros."""
    layout = Layout.causal(1, 8320).slice_rows(8319, 8320)
    backend = CudnnBackend(cases.make_config(topk=2048))
    for winners in (list(range(17, 8317, 83)), []):
        ids = backend.select(tied(layout, winners, stage.device), layout, 2048).indices_TK[0].tolist()
        rest = [i for i in range(8320) if i not in set(winners)]
        assert ids == sorted(winners + rest[: 2048 - len(winners)])


@pytest.mark.parametrize("mask", [-torch.inf, -1e30, torch.finfo(torch.float32).min], ids=str)
def test_scores_beyond_half_precision(mask: float, stage: Stage) -> None:
    """Fewer candidates than k, all outside FP16's range, among masked ones; a row of masked ones; rows with +inf."""
    rows, columns, k = 200, 705, 512
    scores = torch.full((rows, columns), mask)
    candidates = torch.arange(10) * 70 + 3
    scores[:-1, candidates] = -1e5 - torch.arange(10.0)
    scores[100:150, 600] = torch.inf
    length = torch.full((rows,), columns, dtype=torch.int32)
    length[50:60] = 7
    ids, _ = frontend.top_k(scores.to(stage.device), length.to(stage.device), k, False)
    for row, found in enumerate(ids.cpu()):
        valid = found[found >= 0]
        assert valid.numel() == valid.unique().numel() == min(k, int(length[row])) and int(valid.max()) < length[row]
        best = [c for c in candidates.tolist() if c < length[row]] if row < rows - 1 else []
        assert set(best + [600] * (100 <= row < 150)) <= set(valid.tolist())


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_as_many_keys_as_k(length: int, stage: Stage) -> None:
    """The last rows of a document about as long as k: every key, or all but one; attention is then dense."""
    layout, case = Layout.causal(1, length).slice_rows(length - 2, length), Case("", "sparse", 16, 16, 2048, BF16)
    check_case(CudnnBackend(case.config()), case, layout, stage)


def test_scores_are_kept_only_for_the_sparse_loss(stage: Stage) -> None:
    layout = Layout.causal(1, 40)
    for loss, kept in (("off", False), ("sparse", True), ("dense", False)):
        case = Case("packed", loss, 16, 32, 64, torch.bfloat16)
        topk = CudnnBackend(case.config()).select(cases.make_inputs(layout, case, stage.device).indexer, layout, 64)
        assert (topk.scores_TK is not None) == kept


def test_replayed_ids_score_as_selection_did(stage: Stage) -> None:
    for layout in (Layout.packed((0, 90, 250)), cases.zigzag((64, 128), 2)[0]):
        case = Case("packed", "sparse", 16, 32, 64, torch.float32)
        backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, stage.device)
        topk = backend.select(inputs.indexer, layout, 64)
        again = backend._selected_scores(inputs.indexer, topk._replace(scores_TK=None), layout)
        chosen = topk.indices_TK >= 0
        assert topk.scores_TK is not None
        assert torch.equal(again[chosen], topk.scores_TK[chosen])


@pytest.mark.gpu_long
@pytest.mark.parametrize(("rows", "columns"), [(4, 262144), (4, 1048576), (4096, 262209), (8192, 262144)])
@pytest.mark.parametrize("kind", ["normal", "one-bin"])
def test_long_rows_equal_torch_topk(rows: int, columns: int, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(rows, columns, device="cuda", generator=generator)
    if kind == "one-bin":
        scores = 1 + scores * 1e-5
    length = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    ids, values = frontend.top_k(scores, length, 2048, True)
    assert values is not None
    assert bool((ids[:, 1:] > ids[:, :-1]).all()) and torch.equal(scores.gather(1, ids.long()), values)
    for row in torch.linspace(0, rows - 1, min(rows, 64)).long().tolist():
        assert torch.equal(values[row].sort().values, scores[row].topk(2048).values.sort().values)
    for _ in range(4):
        assert torch.equal(frontend.top_k(scores, length, 2048, False)[0], ids)
