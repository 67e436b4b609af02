"""The kernels that a workload must run, alone: the floor that the wiring is measured against.

Operands are made once; each kernel is called as its library's documentation says, rows in chunks of 8192 with causal
offsets (short documents of one length as a batch), and timed by itself. Nothing of the backend under test is used but
the selection's own indices, and its kernel for the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from cudnn import DSA
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.triton_lse import visible_lse
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

from .timing import milliseconds
from .workloads import LATENT, Bench

CHUNK = 8192
DENSE_CHUNK = 2048
# The library has no kernel for the log-sum-exp of each head over all keys; ours is timed beside the bare kernels.
OWN_LSE = "log-sum-exp of each head (ours)"


def bare_milliseconds(bench: Bench, indices: Tensor, length: Tensor) -> dict[str, float]:
    """Kernel name to milliseconds."""
    floor = _Floor(bench, indices, length)
    kernels: dict[str, Callable[[], object]] = {
        "score + top-k": floor.select,
        "attention forward": floor.forward,
        "attention backward": floor.backward,
    }
    if bench.workload.loss == "sparse":
        kernels |= {"target": floor.target, "indexer backward": floor.indexer_backward}
    if bench.workload.loss == "dense":
        kernels |= {"dense scores, target and backward": floor.dense, OWN_LSE: floor.lse_of_heads}
    return {name: milliseconds(kernel) for name, kernel in kernels.items()}


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of one call, and the keys that the last of them sees; several documents of one length form a batch."""

    rows: slice
    keys: slice
    batch: int
    offset: int


def _pieces(layout: Layout, chunk: int) -> Iterator[_Piece]:
    lengths = {segment.num_rows for segment in layout.segments}
    if len(layout.segments) > 1 and len(lengths) == 1 and max(lengths) < chunk and layout.num_rows == layout.num_keys:
        step = chunk // max(lengths) * max(lengths)
        for start in range(0, layout.num_rows, step):
            rows = slice(start, min(start + step, layout.num_rows))
            yield _Piece(rows, rows, (rows.stop - rows.start) // max(lengths), 0)
        return
    for segment in layout.segments:
        for start in range(segment.row_start, segment.row_stop, chunk):
            stop, before = min(start + chunk, segment.row_stop), start - segment.row_start
            seen = segment.causal_offset + before
            keys = slice(segment.key_start, segment.key_start + seen + stop - start)
            yield _Piece(slice(start, stop), keys, 1, seen)


class _Floor:
    def __init__(self, bench: Bench, indices: Tensor, length: Tensor) -> None:
        self.layout, self.rows, self.k = bench.layout, bench.layout.num_rows, bench.workload.k
        self.q, self.kv = bench.q.detach(), bench.kv.detach()
        self.qi, self.ki, self.w = (x.detach() for x in bench.indexer_leaves())
        self.indices, self.length = indices, length
        self.scale = bench.module.softmax_scale
        self.heads = self.q.shape[1]
        padded = max(64, self.qi.shape[1])
        self.qi64 = torch.nn.functional.pad(self.qi, (0, 0, 0, padded - self.qi.shape[1]))
        self.w64 = torch.nn.functional.pad(self.w, (0, padded - self.w.shape[1])).bfloat16()
        self.out, _, self.lse = self.forward()
        self.dout = bench.dout.view(self.rows, self.heads, LATENT)
        self.sink = torch.full((self.heads,), -torch.inf, device=self.q.device)
        self.one = torch.ones(1, device=self.q.device)
        self.pieces = {chunk: list(_pieces(self.layout, chunk)) for chunk in (CHUNK, DENSE_CHUNK)}
        self.offsets = {piece: self._offsets(piece) for pieces in self.pieces.values() for piece in pieces}
        self.lengths = {piece: self._lengths(piece) for piece in self.pieces[CHUNK]}

    def _offsets(self, piece: _Piece) -> Tensor:
        return torch.full((piece.batch,), piece.offset, dtype=torch.int32, device=self.q.device)

    def _lengths(self, piece: _Piece) -> Tensor:
        rows = (piece.rows.stop - piece.rows.start) // piece.batch
        one = torch.arange(piece.offset + 1, piece.offset + rows + 1, dtype=torch.int32, device=self.q.device)
        return one.repeat(piece.batch)

    def _score(self, piece: _Piece) -> Tensor:
        q, w, k = (_batched(x, piece) for x in (self.qi[piece.rows], self.w[piece.rows], self.ki[piece.keys]))
        result = DSA.indexer_forward_wrapper(q, k.unsqueeze(2), w, ratio=1, q_causal_offsets=self.offsets[piece])
        scores: Tensor = result["scores"]
        return scores

    def select(self) -> None:
        for piece in self.pieces[CHUNK]:
            DSA.indexer_top_k_wrapper(self._score(piece).flatten(0, 1), self.lengths[piece], self.k, deterministic=True)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return flash_mla_sparse_fwd(
            self.q, self.kv[:, None], self.indices[:, None], self.scale, LATENT,
            topk_length=self.length, use_legacy=True,
        )  # fmt: skip

    def backward(self) -> None:
        DSA.sparse_attention_backward_wrapper(
            self.q, self.kv, self.out, self.dout, self.lse, self.sink, self.indices,
            softmax_scale=self.scale, topk_length=self.length,
        )  # fmt: skip

    def target(self) -> Tensor:
        return DSA.sparse_attn_score_recompute_wrapper(
            self.q[None], self.kv[None], self.lse[None], self.indices[None], self.scale, topk_length=self.length[None]
        )["target"]

    def indexer_backward(self) -> None:
        for start in range(0, self.rows, CHUNK):
            rows = slice(start, min(start + CHUNK, self.rows))
            ids = self.indices[None, rows]
            score = torch.full(ids.shape, 1.0 / self.k, device=self.q.device)
            DSA.indexer_backward_wrapper(
                self.qi64[None, rows], self.w64[None, rows], self.ki[None], score, score.clone(), ids, self.one
            )

    def dense(self) -> None:
        for piece in self.pieces[DENSE_CHUNK]:
            q, w, qi = (_batched(x[piece.rows], piece) for x in (self.q, self.w64, self.qi64))
            kv, ki = (_batched(x[piece.keys], piece) for x in (self.kv, self.ki))
            offsets = self.offsets[piece]
            target = DSA.dense_attn_score_recompute_wrapper(
                q, kv.unsqueeze(2), _batched(self.lse[piece.rows], piece), self.scale, q_causal_offsets=offsets
            )
            DSA.dense_indexer_backward_wrapper(
                qi, w, ki, target["out"], target["denom"], self._score(piece), target["denom"], self.one,
                q_causal_offsets=offsets,
            )  # fmt: skip

    def lse_of_heads(self) -> None:
        for segment in self.layout.segments:
            keys = self.kv[segment.key_start : segment.key_stop]
            visible_lse(self.q[segment.row_start : segment.row_stop], keys, self.scale, segment.causal_offset)


def _batched(x: Tensor, piece: _Piece) -> Tensor:
    return x.unflatten(0, (piece.batch, -1))
