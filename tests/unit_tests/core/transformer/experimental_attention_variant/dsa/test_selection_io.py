"""Selections saved from one layout and loaded into another: packing, padding, context parallelism, engines' files."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa import (
    Layout,
    Segment,
    TopKRecord,
    load_topk,
    record_topk,
    save_topk,
    selection_io,
)
from megatron.core.transformer.experimental_attention_variant.dsa.collectives import group_rank
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from tests.ranks import run_on_ranks

from . import test_parallel as parallel
from .selections import (
    LAYERS,
    LENGTHS,
    PACKED,
    PADDED,
    K,
    assert_same,
    offsets,
    present,
    record,
    save_shards,
    shards,
    truth,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "keys.safetensors"
    save_topk(path, record(PACKED), PACKED)
    return path


def test_the_file_holds_document_local_positions_and_another_library_reads_it(saved: Path) -> None:
    tensors = load_file(saved)
    assert set(tensors) == {f"layer.{layer}.document.{m}" for layer in LAYERS for m in range(4)}
    for layer in LAYERS:
        for m, length in enumerate(LENGTHS):
            expected = truth(length, layer, m)[:, : min(K, length)].int()
            assert torch.equal(tensors[f"layer.{layer}.document.{m}"], expected)


def test_another_packing_and_padding(saved: Path) -> None:
    assert_same(load_topk(saved, PACKED), record(PACKED))
    assert_same(load_topk(saved, PADDED), record(PADDED))
    tail = Layout.packed((*offsets(LENGTHS), 24), (*offsets(LENGTHS), 40))
    assert_same(load_topk(saved, Layout(tail.num_rows, tail.num_keys, PACKED.segments)),
                record(Layout(tail.num_rows, tail.num_keys, PACKED.segments)))  # fmt: skip


def test_the_same_file_whatever_layout_it_was_recorded_in(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_topk(other, record(PADDED), PADDED)
    assert other.read_bytes() == saved.read_bytes()
    for size in (2, 3):
        save_shards(other, [(record(s, present(s, size)), s) for s in shards(size)])
        assert other.read_bytes() == saved.read_bytes()
    halves = [PACKED.slice_rows(0, 13), PACKED.slice_rows(13, 24)]
    parts = [({n: topk.rows(a, b) for n, topk in record(PACKED).items()}, s)
             for s, (a, b) in zip(halves, ((0, 13), (13, 24)), strict=True)]  # fmt: skip
    save_shards(other, parts)
    assert other.read_bytes() == saved.read_bytes()


def test_documents_count_in_the_order_of_their_keys_whatever_the_rows(saved: Path, tmp_path: Path) -> None:
    rows, segments = 0, []
    for s in reversed(PACKED.segments):
        segments.append(Segment(rows, rows + s.num_rows, s.key_start, 0))
        rows += s.num_rows
    backwards = Layout(rows, PACKED.num_keys, tuple(segments))
    save_topk(tmp_path / "other", record(backwards), backwards)
    assert (tmp_path / "other").read_bytes() == saved.read_bytes()
    assert_same(load_topk(saved, backwards), record(backwards))


@pytest.mark.parametrize("size", [2, 3])
def test_another_context_parallel_size(saved: Path, size: int) -> None:
    for shard in shards(size):
        own = present(shard, size)
        assert_same(load_topk(saved, shard, documents=own), record(shard, own))


def test_a_shard_that_lacks_a_document_has_to_name_its_own(saved: Path) -> None:
    shard = shards(2)[1]
    assert present(shard, 2) == [0, 2, 3]
    with pytest.raises(ValueError, match="gives 4 documents to a layout with rows of 3: say by documents="):
        load_topk(saved, shard)


def test_a_record_knows_its_layout(saved: Path, tmp_path: Path) -> None:
    for known in (TopKRecord(record(PADDED), PADDED), load_topk(saved, PADDED)):
        save_topk(tmp_path / "other", known)
        assert (tmp_path / "other").read_bytes() == saved.read_bytes()


def test_a_layout_of_other_documents_than_the_record_is_refused(tmp_path: Path) -> None:
    """With as many rows it would save other documents under these names."""
    known, one = TopKRecord(record(PACKED), PACKED), Layout.causal(1, PACKED.num_rows)
    with pytest.raises(ValueError, match="of other segments than the pass that was recorded: save without a layout"):
        save_topk(tmp_path / "keys", known, one)
    assert not any(tmp_path.iterdir())


def test_documents_in_another_order_and_a_part_of_them(saved: Path) -> None:
    for documents in ((3, 2, 1, 0), (2,), (2, 0), (1, 1)):
        layout = Layout.packed(offsets([LENGTHS[m] for m in documents]))
        assert_same(load_topk(saved, layout, documents=documents), record(layout, documents))


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    sizes=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    extra=st.integers(0, 2),
)
def test_any_layout_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], sizes: tuple[int, int], extra: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    layouts = []
    for size in sizes:
        padding = tuple(accumulate((2 * size * (extra + -(-n // (2 * size))) for n in lengths), initial=0))
        ranks = [Layout.zigzag(offsets(lengths), size, rank, padding) for rank in range(size)]
        own = [[m for m, start in enumerate(padding[:-1]) if start in {s.key_start for s in r.segments}] for r in ranks]
        layouts.append(list(zip(ranks, own, strict=True)))
    first, second = layouts
    save_shards(path, [(record(layout, own, lengths), layout) for layout, own in first])
    for layout, own in second:
        assert_same(load_topk(path, layout, documents=own), record(layout, own, lengths))


def test_a_document_may_be_cut_at_its_end(saved: Path) -> None:
    layout = Layout.packed((0, 5))
    cut = load_topk(saved, layout, documents=[2])
    assert torch.equal(cut[4].indices_TK, truth(12, 4, 2)[:5].int())


def test_replaying_a_loaded_selection_attends_to_those_keys(tmp_path: Path) -> None:
    """The loaded ids pass the attention of another layout and give the same outputs row by row."""
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import AttentionInputs
    from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

    from .golden_fp8 import fp8_config

    path, backend = tmp_path / "keys", ReferenceBackend(fp8_config("08"))
    save_topk(path, record(PACKED), PACKED)
    torch.manual_seed(0)
    q, kv = torch.randn(24, 2, 80), torch.randn(24, 80)
    plain = backend.attend(AttentionInputs(q, kv, 0.1), load_topk(path, PACKED)[1], PACKED).out_THV
    real = torch.cat([torch.arange(8 * m, 8 * m + n) for m, n in zip((0, 1, 2, 4), LENGTHS, strict=True)])
    q2, kv2 = torch.full((40, 2, 80), torch.nan), torch.full((40, 80), torch.nan)
    q2[real], kv2[real] = q, kv
    padded = backend.attend(AttentionInputs(q2, kv2, 0.1), load_topk(path, PADDED)[1], PADDED).out_THV
    assert torch.allclose(padded[real], plain, atol=1e-6)


# ---- errors ----


def test_saving_refuses_what_it_cannot_tell(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ValueError, match="Nothing was recorded"):
        save_topk(path, {}, PACKED)
    with pytest.raises(ValueError, match="Layer 1 recorded 24 rows, but the layout has 40"):
        save_topk(path, record(PACKED), PADDED)
    with pytest.raises(ValueError, match="is a dict that does not say which rows and keys it counts: save what"):
        save_topk(path, record(PACKED))
    for lengths in ((4, 3, 1, 12, 4), (7, 1, 11, 5)):  # as many rows, but cut elsewhere
        with pytest.raises(ValueError, match=r"of document \d selected keys that this layout hides from it"):
            save_topk(path, record(PACKED), Layout.packed(offsets(lengths)))
    future = record(PACKED)
    future[4].indices_TK[3, 0] = 4
    with pytest.raises(ValueError, match="Token 3 of document 0 selected keys that this layout hides from it"):
        save_topk(path, future, PACKED)
    shard = shards(2)[0]
    with pytest.raises(ValueError, match="No rank that saves holds token 2 of document 0"):
        save_topk(path, record(shard, present(shard, 2)), shard)
    changed = record(PACKED)
    changed[4].indices_TK[23, 0] = -1
    with pytest.raises(ValueError, match="Two ranks hold the same rows of document 3 with different keys"):
        save_shards(path, [(record(PACKED), PACKED), (changed, PACKED)])
    with pytest.raises(FileNotFoundError):
        save_topk(tmp_path / "missing" / "keys", record(PACKED), PACKED)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_file_before_it(saved: Path) -> None:
    before, changed = saved.read_bytes(), record(PACKED)
    changed[4].indices_TK[23, 0] = -1
    with pytest.raises(ValueError, match="Two ranks"):
        save_shards(saved, [(record(PACKED), PACKED), (changed, PACKED)])
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_loading_refuses_other_documents(saved: Path) -> None:
    with pytest.raises(ValueError, match="Document 0 of .* has 7 tokens, but the layout asks for 8"):
        load_topk(saved, Layout.packed((0, 8)), documents=[0])
    with pytest.raises(ValueError, match="has no document 4: it holds documents 0 to 3"):
        load_topk(saved, Layout.packed((0, 7)), documents=[4])


# ---- ranks ----


def _save_and_fail(path: str) -> list[str]:
    """On one of two ranks: a save, then saves that must fail on both; their sentences."""
    rank, everyone = dist.get_rank(), dist.group.WORLD
    shard, doubled = shards(2)[rank], record(PACKED)
    own = record(shard, present(shard, 2))
    save_topk(path, own, shard, everyone)
    if rank:
        doubled[1].indices_TK[23, 0] = -1
    sentences = []
    nothing, fewer = (own if rank else {}), (own if rank else {1: own[1]})
    for selections, layout in ((doubled, PACKED), (nothing, shard), (fewer, shard)):
        with pytest.raises(ValueError) as failure:
            save_topk(path, selections, layout, everyone)
        sentences.append(str(failure.value))
    return sentences


def test_two_ranks_gather_to_one_file_and_fail_together(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "gathered"
    for sentences in run_on_ranks(2, _save_and_fail, str(path)):
        assert "Two ranks hold the same rows of document 3" in sentences[0]
        assert "Nothing was recorded" in sentences[1]
        assert "The ranks recorded layers [[1], [1, 4]]" in sentences[2]
    assert path.read_bytes() == saved.read_bytes()


TP2_CP2, TP2_DP2 = parallel.Case(2, 2, True, True, None), parallel.Case(2, 1, False, True, None)


def _pass_of(case: parallel.Case, groups: ProcessGroupCollection, seed: int) -> TopKRecord:
    """What a rank records; documents differ by ``seed``."""
    cp_rank = group_rank(groups.cp)
    local = parallel.local_inputs(case, group_rank(groups.tp), cp_rank)
    module = parallel.make_module(parallel.make_config(case, parallel=case.tp > 1), groups)
    packed, rows = PackedSeqParams.from_offsets(parallel.REAL, parallel.PADDED), len(parallel.rows_of(case, cp_rank))
    context = ForwardContext.build(1, rows, packed, "cpu", cp_group=groups.cp)
    with record_topk(module) as record, torch.no_grad():
        module(local["query"], local["key"], x=local["x"] + seed * local["x"].roll(1, 1), qr=local["qr"],
               context=context)  # fmt: skip
    return record


def _save_a_pass(folder: Path) -> list[str]:
    """On one of four ranks: saves of passes, and the sentences where the group has ranks of another pass."""
    groups = build_process_groups(ParallelSizes(4, tensor=2, context=2), "cpu")
    save_topk(folder / "tp2-cp2", _pass_of(TP2_CP2, groups, 0), group=groups.tp_cp)
    groups = build_process_groups(ParallelSizes(4, tensor=2), "cpu")
    replica = group_rank(groups.dp)
    record = _pass_of(TP2_DP2, groups, replica)
    save_topk(folder / f"tp2-dp{replica}", record, group=groups.tp_cp)
    sentences = []
    for group, selections in (
        (groups.world, record),
        (groups.dp, record),
        (groups.world, _pass_of(TP2_DP2, groups, 0)),  # the replicas' keys are equal by chance
        (groups.world, dict(record)),
    ):
        with pytest.raises(ValueError) as failure:
            save_topk(folder / "refused", selections, record.layout, group)
        sentences.append(str(failure.value))
    return sentences


def test_the_ranks_of_one_pass_save_it_and_other_groups_are_refused(tmp_path: Path) -> None:
    ranks = run_on_ranks(4, _save_a_pass, tmp_path)
    for seed, names in ((0, ("tp2-cp2", "tp2-dp0")), (1, ("tp2-dp1",))):
        save_topk(tmp_path / "one", _pass_of(parallel.Case(1, 1, False, True, None), ProcessGroupCollection(), seed))
        for name in names:
            assert (tmp_path / name).read_bytes() == (tmp_path / "one").read_bytes()
    assert (tmp_path / "tp2-dp0").read_bytes() != (tmp_path / "tp2-dp1").read_bytes()
    assert not (tmp_path / "refused").exists()
    for sentences in ranks:
        for sentence in sentences[:3]:
            assert "Ranks 0 and 2 both hold" in sentence or "Ranks 1 and 3 both hold" in sentence
            assert "rows of document 0 without being tensor-parallel ranks of each other" in sentence
        assert "leave data-parallel ranks out of the group, and where it has none" in sentences[3]


def test_the_package_exports_both() -> None:
    assert save_topk is selection_io.save_topk and load_topk is selection_io.load_topk
