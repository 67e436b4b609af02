"""Sparse attention over selected keys: FlashMLA forward, cuDNN Frontend backward.

Legend: T rows, S keys, H attention heads, D head width, V value width, K selected keys.

Backward takes the forward's own output and lse, so nothing runs twice, and rows that select nothing stay where they are
(both kernels handle them): q, the output and its gradient are handed over as they lie. Operands in another dtype than
BF16 are rounded to it at this boundary; outputs and gradients come back in the operands' dtypes. Forward and backward
are one autograd function, so neither ever meets the log-sum-exp of another backend's kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..protocol import Attended, AttentionInputs, TopK
from . import frontend


class _Spec(NamedTuple):
    scale: float
    value_dim: int


def attend(attention: AttentionInputs, topk: TopK, value_dim: int) -> Attended:
    """Softmax over the selected keys (see the protocol)."""
    indices_TK = frontend.pad_topk(topk.indices_TK)
    spec = _Spec(attention.scale, value_dim)
    operands = (attention.q_THD, attention.kv_SD, indices_TK, topk.length_T, spec)
    return Attended(*_Attend.apply(*operands))  # type: ignore[no-untyped-call]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, kv_SD: Tensor, indices_TK: Tensor, length_T: Tensor, spec: _Spec
    ) -> tuple[Tensor, Tensor]:
        q, kv = frontend.to_bf16(q_THD), frontend.to_bf16(kv_SD)
        out, lse = frontend.sparse_forward(q, kv, indices_TK, length_T, spec.scale, spec.value_dim)
        ctx.save_for_backward(q, kv, out, lse, indices_TK, length_T)
        ctx.spec = spec
        ctx.dtypes = q_THD.dtype, kv_SD.dtype
        ctx.mark_non_differentiable(lse)
        return out.to(q_THD.dtype), lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, indices_TK, length_T = ctx.saved_tensors
        # Saved outputs come back attached to this graph, and kernels refuse such tensors.
        operands = (q, kv, out.detach(), frontend.to_bf16(grads[0]), lse.detach())
        dq, dkv = frontend.sparse_backward(operands, indices_TK, length_T, ctx.spec.scale)
        return dq.to(ctx.dtypes[0]), dkv.to(ctx.dtypes[1]), None, None, None
