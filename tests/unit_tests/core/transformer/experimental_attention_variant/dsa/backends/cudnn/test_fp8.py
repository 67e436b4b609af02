"""FP8 scoring of the cudnn backend, in every layout, against the reference on the same codes and scales.

The emulator sums in FP32, so its sets equal the reference's exactly. Hopper's tensor cores keep fewer bits of a sum,
so on the kernels a selected key may score lower than the best unselected one by ``TENSOR_CORE_TOLERANCE`` of the row's
largest. Golden files bound both: ``tol``, ``must`` and ``may`` for any order of FP32 sums, and the same with ``_tc``
for tensor cores. Files 01 and 02 are exact in any order, so there nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import (
    CudnnBackend,
    frontend,
    scoring,
    topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.capability import unsupported
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    IndexerInputs,
    QuantizedInputs,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, Segment, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.precision import quantize_operands
from megatron.core.transformer.experimental_attention_variant.dsa.quantization import Quantized
from megatron.core.transformer.experimental_attention_variant.dsa.reference import (
    ReferenceBackend,
    score,
    select,
    selected_mask,
)

from ... import golden_fp8
from ...golden_fp8 import FINITE, bits, fp8_config, golden, is_exact, visible
from .. import cases
from ..cases import Case
from ..conftest import Stage
from ..emulator import shown_keys

TENSOR_CORE_TOLERANCE = 1e-3
SMALL_BUDGET = 12 * 64 * 96


def config_of(case: Case, **changes: Any):
    return case.config(scoring_precision="fp8", **changes)


def worst_gap(scores_TS: Tensor, layout: Layout, ids_TK: Tensor, length_T: Tensor) -> float:
    """By how much an unselected visible key outscores a selected one, relative to the row's largest score."""
    starts, ends = row_bounds(layout, scores_TS.device)
    columns = torch.arange(scores_TS.shape[1], device=scores_TS.device)
    visible = (columns >= starts[:, None]) & (columns < ends[:, None])
    chosen = torch.zeros_like(visible)
    chosen.scatter_(1, ids_TK.clamp(min=0).long(), ids_TK >= 0)
    chosen[:, 0] = (ids_TK == 0).any(1)
    best_out = scores_TS.masked_fill(~visible | chosen, -torch.inf).amax(1)
    worst_in = scores_TS.masked_fill(~chosen, torch.inf).amin(1)
    largest = scores_TS.masked_fill(~visible, 0.0).abs().amax(1).clamp(min=1e-6)
    gap = ((best_out - worst_in) / largest)[(length_T > 0) & (ends - starts > length_T)]
    return float(gap.max()) if gap.numel() else 0.0


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32", "fp32_k"])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("carrier", cases.CARRIERS, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(cases.LAYOUTS))
def test_selection_equals_the_reference(
    name: str, carrier: torch.dtype, heads: int, scale_format: str, stage: Stage
) -> None:
    if (scale_format != "ue8m0") and (heads == 64 or carrier is torch.float32):
        heads, carrier = 32, torch.bfloat16  # one cell a format is enough: formats differ in quantization alone
    case = Case(name, "off", 16, heads, 64, carrier)
    config = config_of(case, fp8_scale_format=scale_format)
    for layout in case.layouts():
        indexer = cases.make_inputs(layout, case, stage.device).indexer
        got = CudnnBackend(config).select(indexer, layout, case.k)
        wanted = ReferenceBackend(config).select(indexer, layout, case.k)
        assert torch.equal(got.length_T, wanted.length_T)
        if stage.emulator is not None:
            assert torch.equal(got.indices_TK, wanted.indices_TK)
            continue
        exact = score(quantize_operands(indexer, scale_format))
        assert worst_gap(exact, layout, got.indices_TK, got.length_T) < TENSOR_CORE_TOLERANCE


def random_operands(layout: Layout, heads: int, device: torch.device) -> QuantizedInputs:
    case = Case("batch1", "off", 16, heads, 64, torch.bfloat16)
    made = scoring.scoring_operands(cases.make_inputs(layout, case, device).indexer, config_of(case))
    assert isinstance(made, QuantizedInputs)
    return made


@pytest.mark.parametrize("heads", [32, 64])
def test_scores_equal_the_dequantized_reference(heads: int, stage: Stage) -> None:
    """Tight against the dequantized operands, loose against what was quantized; the mask by lengths is exact."""
    case = Case("batch1", "off", 16, heads, 64, torch.bfloat16)
    layout = case.layouts()[0]
    indexer = cases.make_inputs(layout, case, stage.device).indexer
    operands = scoring.scoring_operands(indexer, config_of(case))
    assert isinstance(operands, QuantizedInputs)
    (call,) = scoring.plan(layout, stage.device, scoring.BYTE_BUDGET).calls
    got = scoring.score(operands, call)[:, : layout.num_keys]
    seen = torch.ones_like(got, dtype=torch.bool).tril()
    tight, loose = score(quantize_operands(indexer)), score(indexer)
    assert cases.relative_error(got[seen], tight[seen]) < 5e-4
    assert 5e-3 < cases.relative_error(got[seen], loose[seen]) < 5e-2


# ---- what is -inf ----


# Chunks of 33 and 13 keys: rank 0 has the offsets 0 and 3 modulo 4, rank 1 has 1 and 2.
MASKED = {
    "packed": [Layout.packed((0, 5, 75, 108, 237))],
    "padded": [Layout.packed((0, 5, 75, 108), (0, 16, 96, 144))],
    "zigzag": [Layout.zigzag((0, 132, 132 + 52), 2, rank) for rank in range(2)],
    "rows": [Layout.causal(1, 150).slice_rows(43, 150)],
}


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("name", MASKED)
def test_the_mask_is_exact_where_no_tile_leaks(name: str, heads: int, stage: Stage) -> None:
    """64 heads, and 32 at offsets of 0 and 3 modulo 4: -inf is past each row's length, and nowhere else."""
    checked = 0
    for layout in MASKED[name]:
        if heads == 32 and any(s.causal_offset % 4 in (1, 2) for s in layout.segments):
            continue
        starts, ends = row_bounds(layout, stage.device)
        for call in scoring.plan(layout, stage.device, scoring.BYTE_BUDGET).calls:
            rows = slice(call.start, call.stop)
            length = (ends - starts)[rows, None]
            shown = torch.isfinite(scoring.score(random_operands(layout, heads, stage.device), call))
            wanted = torch.arange(shown.shape[1], device=stage.device) < length
            assert torch.equal(shown[length[:, 0] > 0], wanted[length[:, 0] > 0])
            checked += 1
    assert checked


LEAKS = [(32, 0, 0, 0), (32, 1, 1 / 32, 2), (32, 2, 1 / 64, 1), (32, 3, 0, 0), *((64, n, 0, 0) for n in range(4))]


@pytest.mark.parametrize(("heads", "offset", "row_share", "keys"), LEAKS)
def test_the_leak_is_that_of_bf16(heads: int, offset: int, row_share: float, keys: int, stage: Stage) -> None:
    """32 heads, offset 1 mod 4: one row in 32 shows 1 or 2 future keys; 2 mod 4: one in 64 shows one; else none."""
    rows = 512
    layout = Layout(rows, rows + offset, (Segment(0, rows, 0, offset),))
    operands = random_operands(layout, heads, stage.device)
    shown = torch.isfinite(scoring.score(operands, scoring.segment_calls(layout, stage.device)[0])).cpu()
    limits = torch.arange(rows)[:, None] + offset + 1
    leaked = (shown & (torch.arange(rows + offset) >= limits)).sum(1)
    assert bool((shown | (torch.arange(rows + offset) >= limits)).all()), "no visible key is missing"
    assert float((leaked > 0).float().mean()) == pytest.approx(row_share, abs=1 / rows)
    assert int(leaked.max()) == keys
    assert torch.equal(shown, shown_keys(rows, rows + offset, offset, heads))


# ---- golden files ----


def on_device(indexer: IndexerInputs, device: torch.device) -> IndexerInputs:
    return IndexerInputs(indexer.q_TID.to(device), indexer.k_SD.to(device), indexer.w_TI.to(device))


def golden_scores(number: str, device: torch.device) -> Tensor:
    """The backend's scores of a golden file, ``[T, S]`` on the host; 0 where a row sees nothing."""
    layout, seen = golden_fp8.layout(number), visible(number)
    operands = scoring.scoring_operands(on_device(golden_fp8.operands(number), device), fp8_config(number))
    scores_TS = torch.zeros(seen.shape)
    starts = row_bounds(layout, "cpu")[0].tolist()
    for call in scoring.plan(layout, device, scoring.BYTE_BUDGET).calls:
        part = scoring.score(operands, call).cpu()
        for row in range(call.start, call.stop):
            width = min(part.shape[1], seen.shape[1] - starts[row])
            scores_TS[row, starts[row] : starts[row] + width] = part[row - call.start, :width]
    return scores_TS.where(seen, 0.0)


@pytest.mark.parametrize("number", FINITE)
def test_golden_files(number: str, stage: Stage) -> None:
    file, seen = golden(number), visible(number)
    order = "" if stage.emulator is not None else "_tc"
    scores_TS = golden_scores(number, stage.device)
    tolerance = file[f"tol{order}"]
    assert ((scores_TS - file["logits"]).abs() <= tolerance)[seen].all()
    # DeepGEMM's order of sums is within FP32's bound, so the scores are this close to it.
    assert ((scores_TS - file["logits_dg90"]).abs() <= tolerance + file["tol"])[seen].all()

    indexer, width = on_device(golden_fp8.operands(number), stage.device), file["topk_ids"].shape[1]
    ids_TK = CudnnBackend(fp8_config(number)).select(indexer, golden_fp8.layout(number), width).indices_TK.cpu()
    chosen = selected_mask(ids_TK, seen.shape[1])
    assert not (file[f"must{order}"].bool() & ~chosen).any() and not (chosen & ~file[f"may{order}"].bool()).any()
    if is_exact(number):
        assert torch.equal(bits(scores_TS[seen] + 0.0), bits(file["logits"][seen] + 0.0))
    if is_exact(number) or stage.emulator is not None:
        assert torch.equal(ids_TK, file["topk_ids"])


@pytest.mark.parametrize("number", FINITE)
def test_deepgemms_order_of_sums_selects_the_golden_sets(number: str) -> None:
    """The files agree with themselves: what conforms to their bounds selects what they say."""
    file, seen = golden(number), visible(number)
    assert ((file["logits_dg90"] - file["logits"]).abs() <= file["tol"])[seen].all()
    topk_ids = select(file["logits_dg90"].where(seen, 0.0), seen, file["topk_ids"].shape[1]).indices_TK
    assert torch.equal(topk_ids, file["topk_ids"])


def test_the_checked_mode_raises(stage: Stage) -> None:
    indexer, layout = on_device(golden_fp8.operands("12"), stage.device), golden_fp8.layout("12")
    with pytest.raises(ValueError, match="indexer vectors hold NaN or infinity"):
        CudnnBackend(fp8_config("12", fp8_check_finite=True)).select(indexer, layout, 6)
    CudnnBackend(fp8_config("12")).select(indexer, layout, 6)
    finite = on_device(golden_fp8.operands("08"), stage.device)
    CudnnBackend(fp8_config("08", fp8_check_finite=True)).select(finite, golden_fp8.layout("08"), 16)


def test_top_k_ranks_negative_zero_below_zero(stage: Stage) -> None:
    """A fact of the library, in short rows and in long ones; scoring makes no -0.0, which the next test holds."""
    for columns, k in ((7, 3), (300, 64), (20000, 2048)):
        scores = torch.zeros(3, columns, device=stage.device)
        scores[:, ::2] = -0.0
        scores[1, -1], scores[2, -2:] = 1.0, -1.0
        length = torch.full((3,), columns, dtype=torch.int32, device=stage.device)
        ids, _ = frontend.top_k(scores, length, k, False)
        first = torch.arange(1, 2 * k, 2, dtype=torch.int32, device=stage.device)[: min(k, columns // 2)]
        with_last = torch.cat((first[: k - 1], length[:1] - 1))
        assert torch.equal(ids[:2], torch.stack((first, with_last)))


def test_scores_that_are_zero_for_different_reasons_tie(stage: Stage) -> None:
    """Under negative weights: no positive product (-0.0 each), codes that round to zero, and keys of zeros."""
    rows, k = 96, 16
    q = torch.zeros(rows, 32, 128, device=stage.device)
    keys = torch.zeros(rows, 128, device=stage.device)
    w = torch.full((rows, 32), -(2.0**-100), device=stage.device)
    q[:, :, 0], keys[::3, 0], keys[1::3, 0] = 1.0, -1.0, 2.0**-100
    config = config_of(Case("batch1", "off", 16, 32, k, torch.float32))
    made = CudnnBackend(config).select(IndexerInputs(q, keys, w), Layout.causal(1, rows), k)
    wanted = torch.arange(k, device=stage.device).expand(rows, k)
    wanted = wanted.masked_fill(wanted > torch.arange(rows, device=stage.device)[:, None], -1).int()
    assert torch.equal(made.indices_TK, wanted)


# ---- what is scored in which precision ----


def select_only(backend: CudnnBackend, inputs: cases.Inputs, layout: Layout, k: int) -> None:
    backend.select(inputs.indexer, layout, k)


def select_and_teach(backend: CudnnBackend, inputs: cases.Inputs, layout: Layout, k: int) -> None:
    chosen = backend.select(inputs.indexer, layout, k)
    attended = backend.attend(inputs.attention, chosen, layout).detach()
    cases.kl_sum(backend, inputs, attended, chosen, layout, not backend.config.use_sparse_loss).backward()


def replay(backend: CudnnBackend, inputs: cases.Inputs, layout: Layout, k: int) -> None:
    chosen = backend.select(inputs.indexer, layout, k)._replace(scores_TK=None)
    backend._selected_scores(inputs.indexer, chosen, layout)


# What runs, and the loss that it is configured with.
VERBS: dict[str, tuple[Callable[[CudnnBackend, cases.Inputs, Layout, int], None], str]] = {
    "select": (select_only, "off"),
    "replay": (replay, "off"),
    "sparse": (select_and_teach, "sparse"),
    "dense": (select_and_teach, "dense"),
}


@pytest.mark.parametrize(
    ("verb", "precision"),
    [(verb, "bf16") for verb in VERBS] + [("select", "fp8"), ("replay", "fp8")],  # FP8 trains no indexer
)
@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", list(cases.LAYOUTS))
def test_every_call_sees_the_configured_precision(  # noqa: PLR0913
    name: str, budget: int, verb: str, precision: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spy on the one scoring call: operand types in every layout, FP32 carriers, FP32 head weights."""
    seen = []
    real = frontend.score_segments

    def spy(q: Tensor | Quantized, k: Tensor | Quantized, w: Tensor, segments: Any) -> Tensor:
        seen.append((q, k, w))
        return real(q, k, w, segments)

    monkeypatch.setattr(scoring, "score_segments", spy)
    run, loss = VERBS[verb]
    case = Case(name, loss, 16, 32, 64, torch.float32)
    config = case.config(scoring_precision=precision)
    for layout in case.layouts():
        calls = len(scoring.plan(layout, stage.device, budget).calls)
        before = len(seen)
        run(CudnnBackend(config, budget), cases.make_inputs(layout, case, stage.device), layout, case.k)
        made = len(seen) - before
        if verb == "dense":  # then each segment, cut by rows where it is large
            assert made >= calls + len(layout.segments)
        else:
            assert made == (2 * calls if verb == "replay" else calls)
    for q, k, w in seen:
        assert w.dtype == torch.float32
        if precision == "fp8":
            assert isinstance(q, Quantized) and isinstance(k, Quantized)
            assert q.values.dtype == k.values.dtype == torch.float8_e4m3fn
        else:
            assert isinstance(q, Tensor) and isinstance(k, Tensor) and q.dtype == k.dtype == torch.bfloat16


def just_above_one(layout: Layout, device: torch.device) -> IndexerInputs:
    q = torch.zeros(layout.num_rows, 32, 128, device=device)
    k = torch.zeros(layout.num_keys, 128, device=device)
    w = torch.zeros(layout.num_rows, 32, device=device)
    q[:, 0, 0], k[:, 0], w[:, 0] = 1.001, 1.001, 1.0
    return IndexerInputs(q, k, w)


@pytest.mark.parametrize(("precision", "wanted"), [("bf16", 1.0), ("fp8", 1.0)])
@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
def test_operands_just_above_one(precision: str, wanted: float, budget: int, stage: Stage) -> None:
    """q = k = 1.001 in one channel and one head, weight 1: rounded at the boundary, the score is 1.0 exactly."""
    case = Case("batch1", "off", 16, 32, 64, torch.float32)
    layout = case.layouts()[0]
    config = case.config(scoring_precision=precision)
    operands = scoring.scoring_operands(just_above_one(layout, stage.device), config)
    for call in scoring.plan(layout, stage.device, budget).calls:
        scores = scoring.score(operands, call)
        for row in range(0, call.stop - call.start, 7):
            seen = scores[row, : call.start + row + 1]
            assert torch.equal(seen.unique(), torch.tensor([wanted], device=stage.device))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
def test_scores_are_the_same_kept_or_made_again(precision: str, budget: int, stage: Stage) -> None:
    """What selection keeps is, bit for bit, what scoring the given ids makes: of random operands, and of 1.001."""
    case = Case("zigzag2", "off", 16, 32, 64, torch.float32)
    config = case.config(scoring_precision=precision)
    for layout in case.layouts():
        for indexer in (cases.make_inputs(layout, case, stage.device).indexer, just_above_one(layout, stage.device)):
            operands = scoring.scoring_operands(indexer, config)
            kept: TopK = topk.select(operands, layout, case.k, True, budget)
            again = topk.scores_of(operands, layout, kept.indices_TK, budget)
            assert kept.scores_TK is not None
            chosen = kept.indices_TK >= 0
            assert chosen.any() and torch.equal(bits(kept.scores_TK[chosen]), bits(again[chosen]))
        assert kept.scores_TK[chosen].eq(1.0).all()


@pytest.mark.parametrize("heads", [8, 16, 48])
def test_other_head_counts_are_refused(heads: int) -> None:
    config = config_of(Case("batch1", "off", 16, 32, 64, torch.bfloat16))
    reason = unsupported(replace(config, n_heads=heads), torch.device("cpu"))
    assert reason is not None and f"dsa_indexer_n_heads={heads}" in reason and "32 or 64" in reason
