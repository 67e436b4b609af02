"""The kernels that a workload must run, alone: the floor that the wiring is measured against.

Operands are made once; each kernel is called as its library's documentation says, rows in chunks of 8192 with causal
offsets, and timed by itself. Nothing of the backend under test is used but the selection's own indices, and its kernel
for the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cudnn import DSA
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.triton_lse import visible_lse

from .timing import milliseconds
from .workloads import LATENT, Bench

CHUNK = 8192
DENSE_CHUNK = 2048
# The library has no kernel for the log-sum-exp of each head over all keys; ours is timed beside the bare kernels.
OWN_LSE = "log-sum-exp of each head (ours)"


def bare_milliseconds(bench: Bench, indices: Tensor, length: Tensor) -> dict[str, float]:
    """Kernel name to milliseconds; needs one causal document on one rank."""
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


class _Floor:
    def __init__(self, bench: Bench, indices: Tensor, length: Tensor) -> None:
        self.rows, self.k = bench.layout.num_rows, bench.workload.k
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
        self.offsets = {start: self._offset(start) for start in range(0, self.rows, DENSE_CHUNK)}

    def _offset(self, start: int) -> Tensor:
        return torch.tensor([start], dtype=torch.int32, device=self.q.device)

    def _score(self, start: int, stop: int) -> Tensor:
        result = DSA.indexer_forward_wrapper(
            self.qi[None, start:stop],
            self.ki[None, :stop, None],
            self.w[None, start:stop],
            ratio=1,
            q_causal_offsets=self.offsets[start],
        )
        return result["scores"][0]

    def select(self) -> None:
        for start in range(0, self.rows, CHUNK):
            stop = min(start + CHUNK, self.rows)
            lengths = torch.arange(start + 1, stop + 1, dtype=torch.int32, device=self.q.device)
            DSA.indexer_top_k_wrapper(self._score(start, stop), lengths, self.k, deterministic=True)

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
        for start in range(0, self.rows, DENSE_CHUNK):
            stop = min(start + DENSE_CHUNK, self.rows)
            target = DSA.dense_attn_score_recompute_wrapper(
                self.q[None, start:stop], self.kv[None, :stop, None], self.lse[None, start:stop], self.scale,
                q_causal_offsets=self.offsets[start],
            )  # fmt: skip
            scores = self._score(start, stop)[None]
            DSA.dense_indexer_backward_wrapper(
                self.qi64[None, start:stop], self.w64[None, start:stop], self.ki[None, :stop], target["out"],
                target["denom"], scores, target["denom"], self.one, q_causal_offsets=self.offsets[start],
            )  # fmt: skip

    def lse_of_heads(self) -> None:
        for start in range(0, self.rows, DENSE_CHUNK):
            stop = min(start + DENSE_CHUNK, self.rows)
            visible_lse(self.q[start:stop], self.kv[:stop], self.scale, start)
