"""The reference's selection and attention: against a loop, by finite differences, and on the rows that break kernels.

Faults of others behind the tests, by kind: a missing ReLU, surplus or missing ids among ties, unstable ties, our own
mask value colliding with scores, too few keys for K, slot order that matters, empty rows that turn into NaN, and NaN in
keys that nobody selects. What cannot occur here: radix or candidate-buffer overflow, odd K, launch limits, 32-bit
element indices (kernels' matters; this backend sorts), base-2 log-sum-exp (pinned below), garbage ids past a row's
length (ids past it are -1 by contract, which the first tests pin; *scores* past it may be anything).
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, reference, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.backends import backend_names, resolve
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    AttentionInputs,
    IndexerInputs,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import valid_rows, visible_keys

from . import oracle
from .helpers import LATENT, LAYOUTS, SMALL, attention_operands, draw, dsa_config, indexer_operands, with_grad

K = 5


@pytest.fixture(params=[256, 3], ids=["one-chunk", "chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at a time: all, or three, so that the cuts fall inside documents and between them."""
    monkeypatch.setattr(reference, "_CHUNK_ROWS", request.param)


def assert_well_formed(topk: TopK, layout: Layout, k: int) -> None:
    starts, ends = row_bounds(layout, "cpu")
    assert topk.indices_TK.dtype == topk.length_T.dtype == torch.int32
    assert topk.indices_TK.shape == (layout.num_rows, k) and topk.scores_TK.shape == (layout.num_rows, k)
    assert topk.length_T.tolist() == (ends - starts).clamp(max=k).tolist()
    for ids, length, start, end in zip(topk.indices_TK.tolist(), topk.length_T.tolist(), starts, ends, strict=True):
        assert ids[length:] == [-1] * (k - length)
        assert ids[:length] == sorted(set(ids[:length])) and all(start <= i < end for i in ids[:length])


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_selection_equals_a_loop(name: str, relu: bool) -> None:
    layout, config = LAYOUTS[name], dsa_config(scoring_relu=relu)
    indexer = indexer_operands(layout)
    topk = reference.ReferenceBackend(config).select(indexer, layout, K)
    assert_well_formed(topk, layout, K)
    q, k, w = indexer.q_TID.numpy(), indexer.k_SD.numpy(), indexer.w_TI.numpy()
    for t, visible in enumerate(oracle.visible_keys_of(layout)):
        scores = oracle.index_scores(q[t], k, w[t], relu)
        ids = oracle.best(scores, visible, K)
        assert topk.indices_TK[t, : len(ids)].tolist() == ids
        np.testing.assert_allclose(topk.scores_TK[t, : len(ids)].numpy(), scores[ids], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_equals_a_loop(name: str) -> None:
    layout, backend = LAYOUTS[name], reference.ReferenceBackend(dsa_config())
    attention = attention_operands(layout)
    topk = backend.select(indexer_operands(layout), layout, K)
    out_THV, lse_TH = backend.attend(attention, topk, layout)
    assert out_THV.shape == (layout.num_rows, 2, LATENT) and lse_TH.shape == (layout.num_rows, 2)
    q, kv = attention.q_THD.numpy(), attention.kv_SD.numpy()
    for t, length in enumerate(topk.length_T.tolist()):
        out, lse = oracle.attend(q[t], kv, topk.indices_TK[t, :length].tolist(), attention.scale, LATENT)
        np.testing.assert_allclose(out_THV[t].numpy(), out, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse_TH[t].numpy(), lse, rtol=1e-12)


def test_the_whole_in_four_lines() -> None:
    """The definition, literally: score, keep the best, attend."""
    layout, config = Layout.causal(1, 11), dsa_config()
    indexer, attention = indexer_operands(layout), attention_operands(layout)
    backend = reference.ReferenceBackend(config)
    out_THV = backend.attend(attention, backend.select(indexer, layout, K), layout).out_THV
    for t in range(11):
        scores_S = (indexer.w_TI[t, :, None] * (indexer.q_TID[t] @ indexer.k_SD[: t + 1].T).clamp(min=0)).sum(0)
        kv_KD = attention.kv_SD[scores_S.topk(min(K, t + 1)).indices]
        out_HV = (attention.q_THD[t] @ kv_KD.T * attention.scale).softmax(-1) @ kv_KD[:, :LATENT]
        torch.testing.assert_close(out_THV[t], out_HV)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("name", SMALL)
def test_attention_gradients_by_finite_differences(name: str) -> None:
    layout, backend = SMALL[name], reference.ReferenceBackend(dsa_config(kv_lora_rank=2))
    topk = backend.select(indexer_operands(layout), layout, 3)
    q_THD, kv_SD = with_grad(draw(layout.num_rows, 2, 3, seed=4), draw(layout.num_keys, 3, seed=5))

    def out(q_THD: Tensor, kv_SD: Tensor) -> Tensor:
        return backend.attend(AttentionInputs(q_THD, kv_SD, 0.3), topk, layout).out_THV

    assert torch.autograd.gradcheck(out, (q_THD, kv_SD))


@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
def test_score_gradients_by_finite_differences(relu: bool) -> None:
    indexer = indexer_operands(Layout.causal(1, 3))

    def scores(q_TID: Tensor, k_SD: Tensor, w_TI: Tensor) -> Tensor:
        return reference.score(IndexerInputs(q_TID, k_SD, w_TI), relu)

    assert torch.autograd.gradcheck(scores, with_grad(indexer.q_TID, indexer.k_SD, indexer.w_TI))


def test_the_relu_comes_before_the_head_weights() -> None:
    """Two heads: key A scores (-3, 1), key B (0, 0.5); with the ReLU A wins 1.0 to 0.5, without it B wins."""
    k_SD = torch.tensor([[-3.0, 1.0], [0.0, 0.5]])
    indexer = IndexerInputs(torch.eye(2).expand(2, 2, 2), k_SD, torch.ones(2, 2))
    scores = reference.score(indexer)
    assert scores[1].tolist() == [1.0, 0.5] and reference.score(indexer, relu=False)[1].tolist() == [-2.0, 0.5]
    both = torch.ones(2, 2, dtype=torch.bool)
    assert reference.select(scores, both, 1).indices_TK[1].tolist() == [0]
    assert reference.select(reference.score(indexer, relu=False), both, 1).indices_TK[1].tolist() == [1]


def test_a_score_of_zero_outranks_a_negative_one() -> None:
    indexer = IndexerInputs(torch.eye(2)[None], torch.tensor([[2.0, 0.0], [-2.0, -1.0]]), torch.tensor([[-1.0, 1.0]]))
    scores = reference.score(indexer)
    assert scores.tolist() == [[-2.0, 0.0]]
    assert reference.select(scores, torch.ones(1, 2, dtype=torch.bool), 1).indices_TK.tolist() == [[1]]


def selected(scores_S: Tensor, k: int, visible_S: Tensor | None = None) -> list[int]:
    """Ids of one row, without its tail."""
    visible_S = torch.ones_like(scores_S, dtype=torch.bool) if visible_S is None else visible_S
    topk = reference.select(scores_S[None], visible_S[None], k)
    length = int(topk.length_T)
    assert length == min(k, int(visible_S.sum())) and topk.indices_TK[0, length:].eq(-1).all()
    return topk.indices_TK[0, :length].tolist()


def test_ties_fill_up_with_the_lowest_ids() -> None:
    """ReLU makes thousands of exact zeros; all K slots are filled, and always by the same keys."""
    scores = torch.zeros(8320)
    winners = torch.randperm(8320, generator=torch.Generator().manual_seed(3))[:100]
    scores[winners] = torch.rand(100) + 0.1
    ids = selected(scores, 2048)
    assert len(set(ids)) == 2048 and set(winners.tolist()) <= set(ids)
    zeros = [i for i in range(8320) if i not in set(winners.tolist())]
    assert sorted(set(ids) - set(winners.tolist())) == zeros[:1948]
    assert selected(torch.zeros(8320), 2048) == list(range(2048))


def test_the_same_keys_every_time() -> None:
    scores = torch.where(draw(301, seed=1).float() > 1.5, draw(301, seed=2).float().abs(), 0.0)
    first = selected(scores, 64)
    assert 0 < int((scores > 0).sum()) < 64
    assert all(selected(scores.clone(), 64) == first for _ in range(50))


def test_negative_zero_is_zero() -> None:
    assert selected(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 2) == [0, 1]
    assert selected(torch.tensor([0.0, -0.0, 1.0]), 2) == [0, 2]


HARD_ROWS = {
    "some infinite": [1.0, torch.inf, 2.0, torch.inf, 0.0],
    "all infinite": [torch.inf] * 5,
    "mostly minus infinity": [-torch.inf, -1e5, -torch.inf, -torch.inf, -1e5],
    "all minus infinity": [-torch.inf] * 5,
    "the lowest number": [torch.finfo(torch.float32).min, -1e30, 0.0, -1e30, torch.finfo(torch.float32).min],
}


@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("name", HARD_ROWS)
def test_no_score_collides_with_the_mask(name: str, k: int) -> None:
    """Keys that a row does not see lie on both sides, with scores that beat all of its own."""
    row = torch.tensor(HARD_ROWS[name])
    scores = torch.cat((torch.full((4,), 7.0), row, torch.full((4,), torch.inf)))
    visible = torch.zeros(13, dtype=torch.bool)
    visible[4:9] = True
    order = sorted(range(5), key=lambda i: (-float(row[i]), i))
    assert selected(scores, k, visible) == sorted(4 + i for i in order[:k])


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 129])
def test_fewer_keys_than_k_is_dense_attention(length: int) -> None:
    """The width stays K, the tail is -1, and rows that see at most K keys attend to all of them."""
    layout, backend = Layout.causal(1, length), reference.ReferenceBackend(dsa_config(topk=64))
    q_THD, kv_SD = with_grad(attention_operands(layout).q_THD, attention_operands(layout).kv_SD)
    topk = backend.select(indexer_operands(layout), layout, 64)
    assert_well_formed(topk, layout, 64)
    out_THV = backend.attend(AttentionInputs(q_THD, kv_SD, 0.3), topk, layout).out_THV
    keys = kv_SD[None, None].expand(1, 2, -1, -1)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], keys, keys[..., :LATENT], is_causal=True, scale=0.3
    )
    torch.testing.assert_close(out_THV[:64], dense[0].transpose(0, 1)[:64])
    out_THV.sum().backward()
    assert q_THD.grad.isfinite().all() and kv_SD.grad.isfinite().all()


def test_the_log_sum_exp_is_natural() -> None:
    layout, backend = Layout.packed((0, 1, 1, 3)), reference.ReferenceBackend(dsa_config())
    attention = attention_operands(layout)
    lse_TH = backend.attend(attention, backend.select(indexer_operands(layout), layout, K), layout).lse_TH
    one_key = (attention.q_THD[0] @ attention.kv_SD[0]) * attention.scale
    torch.testing.assert_close(lse_TH[0], one_key)
    empty = LAYOUTS["all-padding"]
    topk = backend.select(indexer_operands(empty), empty, K)
    assert backend.attend(attention_operands(empty), topk, empty).lse_TH.eq(torch.inf).all()


def test_bf16_operands_are_scored_and_attended_in_fp32() -> None:
    layout, backend = LAYOUTS["packed"], reference.ReferenceBackend(dsa_config(scoring_precision="bf16"))
    indexer, attention = (
        indexer_operands(layout, dtype=torch.bfloat16),
        attention_operands(layout, dtype=torch.bfloat16),
    )
    topk = backend.select(indexer, layout, K)
    out_THV, lse_TH = backend.attend(attention, topk, layout)
    assert topk.scores_TK.dtype == lse_TH.dtype == torch.float32 and out_THV.dtype == torch.bfloat16
    wide = AttentionInputs(attention.q_THD.double(), attention.kv_SD.double(), attention.scale)
    exact = backend.attend(wide, topk, layout)
    torch.testing.assert_close(lse_TH.double(), exact.lse_TH, atol=1e-6, rtol=0)
    # One rounding at the end: half a unit in the last place, and FP32's own error.
    torch.testing.assert_close(out_THV.double(), exact.out_THV, atol=1e-6, rtol=2**-8)


def test_scoring_precision_rounds_at_the_boundary_whatever_the_carrier() -> None:
    layout, config = LAYOUTS["B1-T13"], dsa_config(scoring_precision="bf16")
    carried = indexer_operands(layout, dtype=torch.float32)
    rounded = IndexerInputs(carried.q_TID.bfloat16(), carried.k_SD.bfloat16(), carried.w_TI)
    backend = reference.ReferenceBackend(config)
    a, b = (backend.select(operands, layout, K) for operands in (carried, rounded))
    assert torch.equal(a.indices_TK, b.indices_TK) and torch.equal(a.scores_TK, b.scores_TK)
    exact = reference.ReferenceBackend(dsa_config()).select(carried, layout, K)
    assert not torch.equal(a.scores_TK, exact.scores_TK)


def test_slot_order_changes_nothing() -> None:
    """Backends without a rule for ties may hand ids over in any order, with holes; attention and gradients agree."""
    layout, backend = LAYOUTS["padded"], reference.ReferenceBackend(dsa_config())
    q_THD, kv_SD = with_grad(attention_operands(layout).q_THD, attention_operands(layout).kv_SD)
    topk = backend.select(indexer_operands(layout), layout, K)
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):  # the second moves the tail's -1 to the front of short rows
        q_THD.grad = kv_SD.grad = None
        shuffled = topk._replace(indices_TK=topk.indices_TK[:, order])
        attended = backend.attend(AttentionInputs(q_THD, kv_SD, 0.3), shuffled, layout)
        attended.out_THV.square().sum().backward()
        results.append((attended.out_THV, attended.lse_TH, q_THD.grad, kv_SD.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ["padded", "leading-padding", "zigzag", "slice", "all-padding"])
def test_what_nobody_reads_may_hold_anything(name: str, poison: float) -> None:
    """Keys without a reader, and whole padding rows: outputs, log-sum-exps and gradients equal those over zeros."""
    layout, backend = LAYOUTS[name], reference.ReferenceBackend(dsa_config())
    padding_T = ~valid_rows(layout, "cpu")
    unseen_S = ~visible_keys(layout, "cpu")
    results = []
    for filler in (0.0, poison):
        indexer, attention = indexer_operands(layout), attention_operands(layout)
        for rows in (indexer.q_TID, indexer.w_TI, attention.q_THD):
            rows[padding_T] = filler
        indexer.k_SD[unseen_S] = filler
        topk = backend.select(indexer, layout, K)
        unselected_S = torch.ones(layout.num_keys, dtype=torch.bool)
        unselected_S[topk.indices_TK[topk.indices_TK >= 0].long()] = False
        assert unselected_S[unseen_S].all()
        attention.kv_SD[unselected_S] = filler
        q_THD, kv_SD = with_grad(attention.q_THD, attention.kv_SD)
        attended = backend.attend(AttentionInputs(q_THD, kv_SD, 0.3), topk, layout)
        attended.out_THV.sin().sum().backward()
        results.append((topk.indices_TK, attended.out_THV, attended.lse_TH, q_THD.grad, kv_SD.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    _, out_THV, lse_TH, dq_THD, dkv_SD = results[1]
    assert out_THV[padding_T].eq(0).all() and lse_TH[padding_T].eq(torch.inf).all() and dq_THD[padding_T].eq(0).all()
    assert out_THV.isfinite().all() and dq_THD.isfinite().all() and dkv_SD.isfinite().all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(1, 8))
def test_chunks_cover_the_rows_and_stay_small(documents: list[tuple[int, int]], step: int) -> None:
    real = (0, *accumulate(length for length, _ in documents))
    layout = Layout.packed(real, (0, *accumulate(length + padding for length, padding in documents)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CHUNK_ROWS", step)
        chunks = list(reference._chunks(layout, heads=1))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(layout.num_rows))
    assert all(stop - start <= step for start, stop in chunks)
    assert all(start < stop for start, stop in chunks) or chunks == [(0, 0)]


def test_a_chunk_holds_a_bounded_number_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK_CELLS", 100)
    sizes = [stop - start for start, stop in reference._chunks(Layout.causal(1, 10), heads=3)]
    assert sizes == [3, 3, 3, 1]
    assert len(list(reference._chunks(Layout.causal(1, 10), heads=1000))) == 10


def test_the_registry_names_its_backends() -> None:
    assert resolve("none") is reference.ReferenceBackend and backend_names() == ("none", "cudnn")
    assert reference.ReferenceBackend.unsupported(dsa_config(), torch.device("cuda")) is None
    with pytest.raises(ValueError, match="dsa_kernel_backend='triton' is unknown: use one of none, cudnn"):
        resolve("triton")
