"""The indexer's KL loss through the backend's verbs, against gradients derived by hand, by finite differences, over TP.

Both losses. The teacher is pinned: each head's softmax runs over the *selected* keys with the sparse loss and over all
*visible* keys with the dense one, heads are summed, and only then the sum is normalized. With one head a wrong
denominator cancels, so every case here has at least two, and one test gives them opposite preferences.

The objective has a floor: log-predictions below ``LOG_PREDICTION_FLOOR`` (-100) count as -100, so a key there gets no
gradient of its own. The kernels do the same; both sides of the floor are checked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import DSAConfig, Layout, reference
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    AttentionInputs,
    IndexerInputs,
    TeacherChunk,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import valid_rows, visible_keys
from megatron.core.transformer.experimental_attention_variant.dsa.reference import (
    LOG_PREDICTION_FLOOR,
    ReferenceBackend,
    kl_divergence,
)

from . import oracle
from .helpers import LAYOUTS, SMALL, attention_operands, draw, dsa_config, indexer_operands, with_grad

LOSSES = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


@pytest.fixture(params=[256, 3], ids=["one-chunk", "chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK_ROWS", request.param)


class Loss(NamedTuple):
    """A KL sum, the chunks it came in, and the gradients in q, k, w."""

    kl_sum: Tensor
    chunks: int
    gradients: tuple[Tensor, ...]


def loss_of(config: DSAConfig, indexer: IndexerInputs, attention: AttentionInputs, layout: Layout, dense: bool) -> Loss:
    """The verbs in the order that the module calls them."""
    backend, k = ReferenceBackend(config), config.topk
    leaves = with_grad(indexer.q_TID, indexer.k_SD, indexer.w_TI)
    operands = IndexerInputs(*leaves)
    topk = backend.select(operands, layout, k)
    attended = backend.attend(attention, topk, layout)
    chunks = list(backend.teacher(attention, attended, topk, layout, dense))
    kl_sum = sum((rows_loss(backend, operands, chunk, topk, layout, dense) for chunk in chunks), torch.zeros(()))
    kl_sum.backward()
    return Loss(kl_sum.detach(), len(chunks), tuple(t.grad for t in leaves))


def rows_loss(
    backend: ReferenceBackend, indexer: IndexerInputs, chunk: TeacherChunk, topk: TopK, layout: Layout, dense: bool
) -> Tensor:
    return backend.indexer_loss(indexer, [chunk], topk, layout, dense)


@pytest.mark.usefixtures("chunked")
@LOSSES
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_equal_the_formula(name: str, dense: bool) -> None:
    layout, config = LAYOUTS[name], dsa_config()
    indexer, attention = indexer_operands(layout), attention_operands(layout, heads=3)
    result = loss_of(config, indexer, attention, layout, dense)
    q, k, w = indexer.q_TID.numpy(), indexer.k_SD.numpy(), indexer.w_TI.numpy()
    keys, targets = [], []
    for t, visible in enumerate(oracle.visible_keys_of(layout)):
        ids = list(visible) if dense else oracle.best(oracle.index_scores(q[t], k, w[t]), visible, config.topk)
        keys.append(ids)
        teacher = attention.q_THD[t].numpy(), attention.kv_SD.numpy()
        targets.append(oracle.probabilities(*teacher, ids, attention.scale).sum(0) if ids else np.zeros(0))
    expected, *gradients = oracle.kl_and_gradients(q, k, w, keys, targets)
    np.testing.assert_allclose(result.kl_sum.item(), expected, rtol=1e-10, atol=1e-12)
    for actual, wanted in zip(result.gradients, gradients, strict=True):
        np.testing.assert_allclose(actual.numpy(), wanted, rtol=1e-9, atol=1e-12)
    assert expected > 0.1 or layout.num_valid_rows == 0


@LOSSES
@pytest.mark.parametrize("name", SMALL)
def test_loss_gradients_by_finite_differences(name: str, dense: bool) -> None:
    layout, backend = SMALL[name], ReferenceBackend(dsa_config(topk=3))
    indexer, attention = indexer_operands(layout), attention_operands(layout)
    topk = backend.select(indexer, layout, 3)
    (chunk,) = backend.teacher(attention, backend.attend(attention, topk, layout), topk, layout, dense)

    def loss(q_TID: Tensor, k_SD: Tensor, w_TI: Tensor) -> Tensor:
        return rows_loss(backend, IndexerInputs(q_TID, k_SD, w_TI), chunk, topk, layout, dense)

    assert torch.autograd.gradcheck(loss, with_grad(indexer.q_TID[..., :4], indexer.k_SD[..., :4], indexer.w_TI))


@LOSSES
def test_chunks_change_nothing(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, config = LAYOUTS["padded"], dsa_config()
    operands = indexer_operands(layout), attention_operands(layout)
    whole = loss_of(config, *operands, layout, dense)
    monkeypatch.setattr(reference, "_CHUNK_ROWS", 4)
    parts = loss_of(config, *operands, layout, dense)
    assert (whole.chunks, parts.chunks) == (1, 8)
    for a, b in zip((whole.kl_sum, *whole.gradients), (parts.kl_sum, *parts.gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@LOSSES
def test_the_teacher_is_a_constant(dense: bool) -> None:
    layout, backend = LAYOUTS["packed"], ReferenceBackend(dsa_config())
    q_THD, kv_SD = with_grad(*(getattr(attention_operands(layout), name) for name in ("q_THD", "kv_SD")))
    attention = AttentionInputs(q_THD, kv_SD, 0.3)
    indexer = indexer_operands(layout)
    topk = backend.select(indexer, layout, 5)
    for chunk in backend.teacher(attention, backend.attend(attention, topk, layout), topk, layout, dense):
        assert not chunk.target_RN.requires_grad and (chunk.keys is not None) == dense


@pytest.mark.usefixtures("chunked")
@LOSSES
@pytest.mark.parametrize("name", LAYOUTS)
def test_targets_are_finite_and_zero_where_nothing_is_read(name: str, dense: bool) -> None:
    """They are summed over ranks before anybody masks them."""
    layout, backend = LAYOUTS[name], ReferenceBackend(dsa_config())
    attention = attention_operands(layout)
    attention.q_THD[~valid_rows(layout, "cpu")] = torch.nan
    attention.kv_SD[~visible_keys(layout, "cpu")] = torch.nan
    topk = backend.select(indexer_operands(layout), layout, 5)
    seen, rows = oracle.visible_keys_of(layout), []
    for chunk in backend.teacher(attention, backend.attend(attention, topk, layout), topk, layout, dense):
        for row, target_N in zip(range(*chunk.rows), chunk.target_RN, strict=True):
            columns = range(*chunk.keys) if chunk.keys is not None else topk.indices_TK[row].tolist()
            read = [column in seen[row] for column in columns]
            assert target_N.dtype == torch.float64 and target_N.isfinite().all()
            assert [bool(value > 0) for value in target_N] == read
            torch.testing.assert_close(target_N.sum().item(), 2.0 if any(read) else 0.0)  # two heads
            rows.append(row)
    assert rows == list(range(layout.num_rows))


@LOSSES
def test_heads_with_opposite_preferences(dense: bool) -> None:
    """Two heads, 16 keys, 4 selected: the two possible teachers differ, and each loss takes its own."""
    layout, config = Layout.causal(1, 16), dsa_config(topk=4)
    backend, indexer = ReferenceBackend(config), indexer_operands(layout)
    attention = attention_operands(layout)
    attention.q_THD[:, 1] = -3 * attention.q_THD[:, 0]
    topk = backend.select(indexer, layout, 4)
    attended = backend.attend(attention, topk, layout)
    ((_, keys, target_RN),) = backend.teacher(attention, attended, topk, layout, dense)
    logits_HS = (attention.q_THD[15] @ attention.kv_SD.T) * attention.scale
    chosen = topk.indices_TK[15].long()
    over_visible = logits_HS.softmax(-1).sum(0)
    over_selected = logits_HS[:, chosen].softmax(-1).sum(0)
    torch.testing.assert_close(target_RN[15], over_visible if dense else over_selected)
    assert keys == ((0, 16) if dense else None)
    normalized = over_visible[chosen] / over_visible[chosen].sum()
    assert (normalized - over_selected / 2).abs().max() > 0.05  # with one head the difference would cancel
    one_head = logits_HS[:1].softmax(-1).sum(0)[chosen]
    torch.testing.assert_close(one_head / one_head.sum(), logits_HS[:1, chosen].softmax(-1)[0])


@pytest.mark.usefixtures("chunked")
@LOSSES
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["B1-T16", "padded-T28", "zigzag-T20"])
def test_tensor_parallel_ranks_together_equal_one(name: str, ranks: int, dense: bool) -> None:
    """Each rank holds some heads and all rows; targets are summed over ranks and rows shared out, as at run time."""
    layout = {
        "B1-T16": Layout.causal(1, 16),
        "padded-T28": Layout.packed((0, 9, 10, 21), (0, 11, 12, 28)),
        "zigzag-T20": Layout.zigzag((0, 9, 33), 2, 1, (0, 12, 40)),
    }[name]
    heads = 4
    indexer, attention = indexer_operands(layout), attention_operands(layout, heads=heads)
    whole = loss_of(dsa_config(num_attention_heads=heads), indexer, attention, layout, dense)
    config = dsa_config(num_attention_heads=heads, tensor_model_parallel_size=ranks)
    backends = [ReferenceBackend(config) for _ in range(ranks)]
    leaves = with_grad(indexer.q_TID, indexer.k_SD, indexer.w_TI)
    operands = IndexerInputs(*leaves)
    topk = backends[0].select(operands, layout, config.topk)
    streams = []
    for rank, backend in enumerate(backends):
        mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        local = AttentionInputs(attention.q_THD[:, mine], attention.kv_SD, attention.scale)
        streams.append(list(backend.teacher(local, backend.attend(local, topk, layout), topk, layout, dense)))
    rows = layout.num_rows // ranks
    kl_sum = torch.zeros(())
    for chunks in zip(*streams, strict=True):  # every rank runs the same number of chunks
        summed_RN = torch.stack([chunk.target_RN for chunk in chunks]).sum(0)
        for rank, part_RN in enumerate(summed_RN.chunk(ranks)):  # reduce-scatter
            start, stop = chunks[rank].rows
            assert part_RN.shape[0] == stop - start
            target = TeacherChunk((start, stop), chunks[rank].keys, part_RN)
            mine = (rank * rows, (rank + 1) * rows)
            kl_sum = kl_sum + backends[rank].indexer_loss(
                operands.rows(*mine), [target], topk.rows(*mine), layout.slice_rows(*mine), dense
            )
    kl_sum.backward()
    gradients = tuple(t.grad for t in leaves)
    for a, b in zip((whole.kl_sum, *whole.gradients), (kl_sum.detach(), *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_rows_that_do_not_split_over_the_ranks_are_not_dropped() -> None:
    layout, backend = Layout.causal(1, 5), ReferenceBackend(dsa_config(tensor_model_parallel_size=2))
    attention, topk = attention_operands(layout), backend.select(indexer_operands(layout), layout, 5)
    with pytest.raises(AssertionError, match="multiple of the tensor-parallel ranks"):
        next(iter(backend.teacher(attention, backend.attend(attention, topk, layout), topk, layout, True)))


@pytest.mark.parametrize("mass", [1e-12, 1e-30, 3.0, 1e30])
def test_only_the_direction_of_the_target_counts(mass: float) -> None:
    target_TN, scores_TN = draw(4, 6, seed=1).abs(), draw(4, 6, seed=2)
    mask_TN = torch.ones(4, 6, dtype=torch.bool)
    scaled = kl_divergence((target_TN * mass).float(), scores_TN.float(), mask_TN)
    torch.testing.assert_close(scaled.double(), kl_divergence(target_TN, scores_TN, mask_TN), rtol=1e-5, atol=0)


def test_a_row_without_mass_or_without_keys_adds_nothing() -> None:
    target_TN, (scores_TN,) = torch.zeros(3, 4), with_grad(draw(3, 4, seed=3).float())
    target_TN[2] = torch.nan  # a row that is masked out holds anything
    mask_TN = torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    loss = kl_divergence(target_TN, scores_TN, mask_TN)
    loss.backward()
    assert loss == 0 and scores_TN.grad.eq(0).all()


def test_columns_behind_the_mask_hold_anything() -> None:
    target_TN, (scores_TN,) = draw(1, 4, seed=3).abs(), with_grad(draw(1, 4, seed=4))
    mask_TN = torch.tensor([[True, False, True, False]])
    clean = kl_divergence(target_TN[:, ::2], scores_TN[:, ::2], mask_TN[:, ::2])
    with torch.no_grad():
        scores_TN[:, 1], scores_TN[:, 3] = torch.nan, torch.inf
    target_TN[:, 1], target_TN[:, 3] = torch.inf, torch.nan
    loss = kl_divergence(target_TN, scores_TN, mask_TN)
    loss.backward()
    assert loss == clean and scores_TN.grad.isfinite().all() and scores_TN.grad[0, 1::2].eq(0).all()


@pytest.mark.parametrize("gap", [60.0, 99.0, 101.0, 150.0])
def test_the_floor_of_the_log_prediction(gap: float) -> None:
    """Teacher 0.5 / 0.5; the student gives the second key e^-gap. Below the floor its term is constant."""
    target_TN, mask_TN = torch.full((1, 2), 0.5, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    (scores_TN,) = with_grad(torch.tensor([[0.0, -gap]], dtype=torch.float64))

    def loss(scores_TN: Tensor) -> Tensor:
        return kl_divergence(target_TN, scores_TN, mask_TN)

    value = loss(scores_TN)
    floored = min(gap, -LOG_PREDICTION_FLOOR)
    assert LOG_PREDICTION_FLOOR == -100.0
    torch.testing.assert_close(value.item(), 0.5 * floored + np.log(0.5))
    value.backward()
    # Above the floor S - p; below it the clipped term is gone: p of the first key pulls alone, and is satisfied.
    expected = [0.5, -0.5] if gap < 100 else [0.0, 0.0]
    torch.testing.assert_close(scores_TN.grad, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(loss, with_grad(scores_TN))


@pytest.mark.usefixtures("chunked")
@LOSSES
@pytest.mark.parametrize("name", ["padded", "leading-padding", "zigzag", "slice", "all-padding"])
def test_what_nobody_reads_may_hold_anything(name: str, dense: bool) -> None:
    """Padding rows and keys, kv of keys that no row may use, scores past the length: NaN changes no bit anywhere."""
    layout, config = LAYOUTS[name], dsa_config()
    backend = ReferenceBackend(config)
    padding_T, unseen_S = ~valid_rows(layout, "cpu"), ~visible_keys(layout, "cpu")
    results = []
    for filler in (0.0, torch.nan):
        indexer, attention = indexer_operands(layout), attention_operands(layout)
        for rows in (indexer.q_TID, indexer.w_TI, attention.q_THD):
            rows[padding_T] = filler
        indexer.k_SD[unseen_S] = filler
        leaves = with_grad(indexer.q_TID, indexer.k_SD, indexer.w_TI)
        operands = IndexerInputs(*leaves)
        topk = backend.select(operands, layout, config.topk)
        unread_S = unseen_S if dense else torch.ones_like(unseen_S)
        if not dense:
            unread_S[topk.indices_TK[topk.indices_TK >= 0].long()] = False
        attention.kv_SD[unread_S] = filler
        assert topk.scores_TK is not None
        topk = topk._replace(scores_TK=topk.scores_TK.masked_fill(topk.indices_TK < 0, filler))
        attended = backend.attend(attention, topk, layout)
        kl_sum = torch.zeros(())
        for chunk in backend.teacher(attention, attended, topk, layout, dense):
            kl_sum = kl_sum + rows_loss(backend, operands, chunk, topk, layout, dense)
        kl_sum.backward()
        results.append((kl_sum.detach(), *(t.grad for t in leaves)))
    assert all(torch.equal(a, b) and b.isfinite().all() for a, b in zip(*results, strict=True))
    assert results[1][1][padding_T].eq(0).all() and results[1][2][unseen_S].eq(0).all()


def test_slot_order_changes_no_loss_and_no_gradient() -> None:
    layout, backend = LAYOUTS["padded"], ReferenceBackend(dsa_config())
    indexer, attention = indexer_operands(layout), attention_operands(layout)
    topk = backend.select(indexer, layout, 5)
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        shuffled = TopK(topk.indices_TK[:, order], topk.length_T, None)
        leaves = with_grad(indexer.q_TID, indexer.k_SD, indexer.w_TI)
        (chunk,) = backend.teacher(attention, backend.attend(attention, shuffled, layout), shuffled, layout, False)
        kl_sum = rows_loss(backend, IndexerInputs(*leaves), chunk, shuffled, layout, False)
        kl_sum.backward()
        results.append((kl_sum.detach(), *(t.grad for t in leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@LOSSES
def test_bf16_rounding_is_straight_through(dense: bool) -> None:
    """Gradients are those at the rounded operands, handed on in the carrier's precision."""
    layout = LAYOUTS["B1-T13"]
    carried, attention = indexer_operands(layout, dtype=torch.float32), attention_operands(layout, dtype=torch.float32)
    rounded = IndexerInputs(carried.q_TID.bfloat16().float(), carried.k_SD.bfloat16().float(), carried.w_TI)
    a = loss_of(dsa_config(scoring_precision="bf16"), carried, attention, layout, dense)
    b = loss_of(dsa_config(scoring_precision="fp32"), rounded, attention, layout, dense)
    assert a.kl_sum == b.kl_sum
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(a.gradients, b.gradients, strict=True))
    assert not torch.equal(a.gradients[0], a.gradients[0].bfloat16().float())


@pytest.mark.parametrize("what", ["attention", "sparse", "dense"])
def test_bf16_keys_add_up_the_gradients_of_many_chunks_in_fp32(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against FP64 on the same numbers, a gradient is off by one rounding to BF16 (2^-9 at most, less in the norm)."""
    monkeypatch.setattr(reference, "_CHUNK_ROWS", 4)
    layout, found = Layout.causal(1, 512), []
    config = dsa_config(topk=512, loss_coeff=1.0, use_sparse_loss=what == "sparse", scoring_precision="bf16")
    for dtype in (torch.bfloat16, torch.float64):
        attention_drawn, indexer_drawn = attention_operands(layout), indexer_operands(layout)
        q, kv = (x.bfloat16().to(dtype) for x in (attention_drawn.q_THD, attention_drawn.kv_SD))
        iq, ik = (x.bfloat16().to(dtype) for x in (indexer_drawn.q_TID, indexer_drawn.k_SD))
        attention = AttentionInputs(q, kv.requires_grad_(what == "attention"), attention_drawn.scale)
        w_TI = indexer_drawn.w_TI.float() if dtype == torch.bfloat16 else indexer_drawn.w_TI.float().double()
        indexer = IndexerInputs(iq, ik.requires_grad_(), w_TI)
        backend = ReferenceBackend(config)
        topk = backend.select(indexer, layout, config.topk)
        attended = backend.attend(attention, topk, layout)
        if what == "attention":
            attended.out_THV.double().square().sum().backward()
            found.append(kv.grad)
            continue
        dense = what == "dense"
        chunks = backend.teacher(attention, attended, topk, layout, dense)
        backend.indexer_loss(indexer, chunks, topk, layout, dense).backward()
        found.append(ik.grad)
    rounded, exact = found
    assert rounded is not None and exact is not None and rounded.dtype == torch.bfloat16
    assert float((rounded.double() - exact).norm() / exact.norm()) < 2.5e-3
