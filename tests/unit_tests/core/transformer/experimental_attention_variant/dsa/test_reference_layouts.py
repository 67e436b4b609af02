"""One set of documents, laid out in every way: a batch, packed, padded, sliced, zigzag over ranks.

What is promised for equal q, k, w. *Selected keys*: equal, always, where scores are exact (small integers here, so that
thousands of ties are exact too), and on any data whose scores differ by more than FP32's own error. *Scores*: bit for
bit where their arithmetic is exact; in general the bits of a matrix product depend on its row count, and one row alone
may be off in the last place. *Outputs, losses and gradients*: to rounding, since padding keys stand between the terms
of a sum. A batch and the same documents packed are one ``Layout``, so those two are equal in every bit.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, reference
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    AttentionInputs,
    IndexerInputs,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from .helpers import INDEX_DIM, LATENT, ROPE, draw, dsa_config, generator, with_grad
from .test_layout import Documents, brute_force

K = 5


class Tokens(NamedTuple):
    """Operands of every token of every document, in document order, without padding."""

    q_TID: Tensor
    k_TD: Tensor
    w_TI: Tensor
    q_THD: Tensor
    kv_TD: Tensor


def exact_tokens(count: int) -> Tokens:
    """Integers and eighths: every score is exact in FP32, whatever the order of its sums, and ties abound."""

    def small(*shape: int, seed: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator(seed)).float()

    indexer = small(count, 3, INDEX_DIM, seed=1), small(count, INDEX_DIM, seed=2), small(count, 3, seed=3) / 8
    return Tokens(*indexer, draw(count, 2, LATENT + ROPE, seed=4), draw(count, LATENT + ROPE, seed=5))


def random_tokens(count: int, dtype: torch.dtype = torch.float64) -> Tokens:
    shapes = (count, 3, INDEX_DIM), (count, INDEX_DIM), (count, 3), (count, 2, LATENT + ROPE), (count, LATENT + ROPE)
    return Tokens(*(draw(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)))


class Placed(NamedTuple):
    """Tokens laid out: which token each row and key is (-1: padding), and the operands, NaN on padding."""

    layout: Layout
    rows: Tensor
    keys: Tensor
    indexer: IndexerInputs
    attention: AttentionInputs

    def slice(self, start: int, stop: int) -> Placed:
        attention = AttentionInputs(self.attention.q_THD[start:stop], self.attention.kv_SD, self.attention.scale)
        rows, indexer = self.rows[start:stop], self.indexer.rows(start, stop)
        return Placed(self.layout.slice_rows(start, stop), rows, self.keys, indexer, attention)


def token_ids(documents: Documents, cp_size: int, cp_rank: int) -> Tensor:
    first = (0, *accumulate(documents.lengths))
    rows = brute_force(documents, cp_size, cp_rank)
    return torch.tensor([first[r.document] + r.position if r.keys else -1 for r in rows], dtype=torch.int64)


def place(tokens: Tokens, documents: Documents, cp_size: int = 1, cp_rank: int = 0) -> Placed:
    layout = Layout.zigzag(documents.offsets, cp_size, cp_rank, documents.padded_offsets)
    rows, keys = token_ids(documents, cp_size, cp_rank), token_ids(documents, 1, 0)

    def take(values: Tensor, ids: Tensor) -> Tensor:
        filled = torch.cat((values, torch.full_like(values[:1], torch.nan)))
        return filled[ids]  # -1 is the last, NaN

    indexer = IndexerInputs(take(tokens.q_TID, rows), take(tokens.k_TD, keys), take(tokens.w_TI, rows))
    attention = AttentionInputs(take(tokens.q_THD, rows), take(tokens.kv_TD, keys), 0.3)
    return Placed(layout, rows, keys, indexer, attention)


def unpadded(documents: Documents) -> Documents:
    return Documents(documents.lengths, documents.lengths)


def gather(parts: list[tuple[Placed, Tensor]], count: int) -> Tensor:
    """Values by token, from the rows of all parts; every token stands in exactly one."""
    out = torch.zeros(count, *parts[0][1].shape[1:], dtype=parts[0][1].dtype)
    times = torch.zeros(count)
    for placed, values in parts:
        real = placed.rows >= 0
        out[placed.rows[real]] = values[real]
        times[placed.rows[real]] += 1
    assert times.eq(1).all()
    return out


def selected_tokens(placed: Placed, topk: TopK) -> Tensor:
    """Selected ids as token numbers; tokens and keys come in one order, so ids stay ascending."""
    ids = topk.indices_TK.long()
    return torch.where(ids >= 0, placed.keys[ids.clamp(min=0)] if len(placed.keys) else ids, -1)


def selection(parts: list[Placed], count: int, backend: ReferenceBackend) -> tuple[Tensor, Tensor]:
    """Selected tokens and their scores, by token."""
    topks = [backend.select(part.indexer, part.layout, K) for part in parts]
    ids = gather([(part, selected_tokens(part, topk)) for part, topk in zip(parts, topks, strict=True)], count)
    scores = gather([(part, topk.scores_TK) for part, topk in zip(parts, topks, strict=True)], count)
    return ids, scores.masked_fill(ids < 0, 0.0)


@st.composite
def laid_out(draw_from: st.DrawFn) -> tuple[Documents, int, list[int]]:
    """Documents padded for a context-parallel size, that size, and where each rank's rows are cut."""
    cp_size = draw_from(st.integers(1, 8))
    multiple = 2 * cp_size if cp_size > 1 else 1
    lengths = draw_from(st.lists(st.integers(0, 19), min_size=1, max_size=4))
    extra = draw_from(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    padded = [(-(-n // multiple) + e) * multiple for n, e in zip(lengths, extra, strict=True)]
    cuts = draw_from(st.lists(st.integers(0, sum(padded) // cp_size), max_size=3))
    return Documents(lengths, padded), cp_size, sorted(cuts)


def shards(tokens: Tokens, documents: Documents, cp_size: int, cuts: list[int]) -> list[Placed]:
    parts = []
    for rank in range(cp_size):
        whole = place(tokens, documents, cp_size, rank)
        edges = [0, *cuts, whole.layout.num_rows]
        parts += [whole.slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    return parts


@settings(max_examples=60)
@given(laid_out())
def test_every_layout_selects_the_same_keys_with_the_same_scores(case: tuple[Documents, int, list[int]]) -> None:
    documents, cp_size, cuts = case
    tokens, backend = exact_tokens(sum(documents.lengths)), ReferenceBackend(dsa_config())
    expected = selection([place(tokens, unpadded(documents))], len(tokens.k_TD), backend)
    actual = selection(shards(tokens, documents, cp_size, cuts), len(tokens.k_TD), backend)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def forward_and_loss(parts: list[Placed], count: int, dense: bool) -> dict[str, Tensor]:
    """Outputs and log-sum-exps by token, the KL sum, and all gradients by token, keys' summed over the parts."""
    backend, results, kl_sum = ReferenceBackend(dsa_config()), [], torch.zeros(())
    sums: dict[str, Tensor] = {}
    for part in parts:
        leaves = with_grad(part.indexer.q_TID, part.indexer.k_SD, part.indexer.w_TI, *vars_of(part.attention))
        indexer, attention = IndexerInputs(*leaves[:3]), AttentionInputs(*leaves[3:], part.attention.scale)
        topk = backend.select(indexer, part.layout, K)
        attended = backend.attend(attention, topk, part.layout)
        loss = attended.out_THV.sin().sum()
        targets = backend.teacher(attention, attended, topk, part.layout, dense)
        indexer_loss = backend.indexer_loss(indexer, targets, topk, part.layout, dense)
        kl_sum = kl_sum + indexer_loss.detach()
        (loss + indexer_loss).backward()
        dq, dk, dw, dq_attention, dkv = (leaf.grad for leaf in leaves)
        results.append((part, attended.out_THV.detach(), attended.lse_TH, dq, dw, dq_attention))
        for name, gradient in (("dk", dk), ("dkv", dkv)):
            assert gradient[part.keys < 0].eq(0).all()
            by_token = torch.zeros(count, gradient.shape[1], dtype=gradient.dtype)
            by_token[part.keys[part.keys >= 0]] = gradient[part.keys >= 0]
            sums[name] = sums.get(name, 0) + by_token
    names = ("out", "lse", "dq", "dw", "dq_attention")
    by_row = {name: gather([(r[0], r[n + 1]) for r in results], count) for n, name in enumerate(names)}
    return by_row | sums | {"kl": kl_sum}


def vars_of(attention: AttentionInputs) -> tuple[Tensor, Tensor]:
    return attention.q_THD, attention.kv_SD


LAYOUTS: dict[str, tuple[Documents, int, list[int]]] = {
    "packed": (Documents([9, 1, 0, 14], [9, 1, 0, 14]), 1, []),
    "padded": (Documents([9, 1, 0, 14], [13, 2, 3, 14]), 1, []),
    "slices": (Documents([9, 1, 0, 14], [9, 1, 0, 14]), 1, [3, 4, 16]),
    "slices of padded": (Documents([9, 1, 0, 14], [12, 4, 4, 20]), 1, [1, 10, 22]),
    "CP2": (Documents([9, 1, 0, 14], [12, 4, 0, 16]), 2, []),
    "CP3 sliced": (Documents([9, 1, 0, 14], [12, 6, 6, 18]), 3, [2, 9]),
    "CP8, one row a chunk": (Documents([9, 1, 0, 14], [16, 16, 0, 16]), 8, []),
}


@pytest.mark.parametrize("chunk_rows", [256, 3])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_losses_and_gradients_agree(
    name: str, dense: bool, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, cp_size, cuts = LAYOUTS[name]
    tokens = random_tokens(24)
    expected = forward_and_loss([place(tokens, unpadded(documents))], 24, dense)
    monkeypatch.setattr(reference, "_CHUNK_ROWS", chunk_rows)
    actual = forward_and_loss(shards(tokens, documents, cp_size, cuts), 24, dense)
    assert expected["kl"] > 1
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-11, atol=1e-13, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_the_carriers_precision_sets_agree_and_floats_to_rounding(name: str, dtype: torch.dtype) -> None:
    documents, cp_size, cuts = LAYOUTS[name]
    drawn = random_tokens(24, dtype)
    tokens = drawn._replace(w_TI=drawn.w_TI.float())
    backend = ReferenceBackend(dsa_config(scoring_precision="bf16" if dtype is torch.bfloat16 else "fp32"))
    results: list[Any] = []
    for parts in ([place(tokens, unpadded(documents))], shards(tokens, documents, cp_size, cuts)):
        ids, scores = selection(parts, 24, backend)
        topks = [backend.select(part.indexer, part.layout, K) for part in parts]
        outs = [backend.attend(p.attention, topk, p.layout).out_THV for p, topk in zip(parts, topks, strict=True)]
        results.append((ids, scores, gather(list(zip(parts, outs, strict=True)), 24)))
    (ids, scores, out), (other_ids, other_scores, other_out) = results
    assert torch.equal(ids, other_ids)
    torch.testing.assert_close(other_scores, scores, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other_out, out, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=1e-6)


def test_a_batch_is_its_documents_packed_in_every_bit() -> None:
    tokens, documents = random_tokens(39, torch.float32), Documents([13] * 3, [13] * 3)
    placed, backend = place(tokens, documents), ReferenceBackend(dsa_config())
    batch = Layout.causal(3, 13)
    assert batch == placed.layout
    a, b = (backend.select(placed.indexer, layout, K) for layout in (batch, placed.layout))
    assert torch.equal(a.indices_TK, b.indices_TK) and torch.equal(a.scores_TK, b.scores_TK)
    outs = [backend.attend(placed.attention, a, layout).out_THV for layout in (batch, placed.layout)]
    assert torch.equal(*outs)
