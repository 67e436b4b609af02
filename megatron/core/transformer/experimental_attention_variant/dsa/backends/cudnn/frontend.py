"""The third-party kernels, called: cuDNN Frontend's DSA namespace and FlashMLA's sparse prefill.

Legend: R rows of one call, S keys, H attention heads, I indexer heads, D head width, V value width, K selected keys.

This file and ``capability.py`` are the only ones that know what a kernel accepts. What it takes care of:

- head counts: zero heads are added only where a kernel must have them, and taken off again; more than 128 attention
  heads run in slices. A padded head gets lse = +inf, so that it has no probability to give anyone;
- the number of selected keys is padded with -1 to a multiple of 128;
- dtypes: q and k in BF16, head weights FP32 for scoring and BF16 for the backward kernels (they take nothing else);
- alignment: row slices of int32 vectors are copied, because kernels compiled for 16-byte aligned tensors refuse them;
- no rows launch nothing;
- both indexer backwards divide by the rows of the call, which ``loss_coeff`` undoes: gradients here are those of a sum.

Everything is for one flattened sequence (batch 1), with ids global to its keys: layouts were resolved before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantization import Quantized

SCORING_HEADS = (16, 32, 64)
FORWARD_HEADS = (64, 128)
BACKWARD_HEADS = (16, 32, 64, 128)
INDEXER_BACKWARD_HEADS = (64,)
SLICE_HEADS = 128
TOPK_MULTIPLE = 128
# A row costs one FP32 score and two words of top-k scratch for each key.
BYTES_A_CELL = 12
# Grid dimension z of the variable-length scoring kernel.
MAX_SEGMENTS_A_CALL = 32768
_ALIGN_BYTES = 16


class Segments(NamedTuple):
    """Variable-length segments of one scoring call; the offsets are int32 on the device."""

    cu_q: Tensor
    cu_k: Tensor
    causal_offsets: Tensor
    max_q: int
    max_k: int


class IndexerGrads(NamedTuple):
    """Gradients of a KL sum: BF16, BF16, FP32."""

    dq_RID: Tensor
    dw_RI: Tensor
    dk_SD: Tensor


def score_segments(q_RID: Tensor | Quantized, k_SD: Tensor | Quantized, w_RI: Tensor, segments: Segments) -> Tensor:
    """FP32 scores ``[R, max_k]`` of each row against its own segment's keys, -inf past the causal limit.

    In FP8 the head weights hold the queries' scales already: FP32 weights tell the kernel so.

    With 32 heads and a causal offset of 1 or 2 modulo 4 a few rows also show a future key or two, so readers go by
    lengths, never by -inf.
    """
    scales: dict[str, Any] = {}
    if isinstance(q_RID, Quantized):
        assert isinstance(k_SD, Quantized)
        scales = {"precision": "fp8", "q_scale": aligned(q_RID.scale), "k_scale": aligned(k_SD.scale).unsqueeze(1)}
        q_RID, k_SD = q_RID.values, k_SD.values
    assert isinstance(q_RID, Tensor) and isinstance(k_SD, Tensor)
    heads = _next_of(SCORING_HEADS, q_RID.shape[1])
    result = _dsa().indexer_forward_wrapper(
        _pad_heads(q_RID, heads),
        k_SD.unsqueeze(1),
        _pad_heads(w_RI, heads),
        ratio=1,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        q_causal_offsets=segments.causal_offsets,
        **scales,
    )
    scores: Tensor = result["scores"]
    return scores


def top_k(scores_RS: Tensor, length_R: Tensor, k: int, with_scores: bool) -> tuple[Tensor, Tensor | None]:
    """Column ids ``[R, k]`` of the best ``min(k, length)`` leading columns, ascending, then -1; and their scores."""
    result = _dsa().indexer_top_k_wrapper(scores_RS, aligned(length_R), k, return_val=with_scores, deterministic=True)
    return result["indices"], result["values"]


def to_bf16(x: Tensor) -> Tensor:
    """A constant that every kernel takes: BF16 and contiguous."""
    return x.detach().to(torch.bfloat16).contiguous()


def pad_topk(indices_RK: Tensor) -> Tensor:
    """Ids padded with -1 to a width that every kernel takes."""
    missing = -indices_RK.shape[1] % TOPK_MULTIPLE
    return F.pad(indices_RK, (0, missing), value=-1) if missing else indices_RK.contiguous()


def sparse_forward(
    q_RHD: Tensor, kv_SD: Tensor, indices_RK: Tensor, length_R: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """BF16 output ``[R, H, V]`` and natural-log lse ``[R, H]``; an empty row gives 0 and +inf."""
    if not q_RHD.shape[0]:
        lse_RH = q_RHD.new_full(q_RHD.shape[:2], torch.inf, dtype=torch.float32)
        return q_RHD.new_zeros((*q_RHD.shape[:2], value_dim)), lse_RH
    outs, lses = [], []
    for q in _head_slices(q_RHD):
        out, _, lse = flash_forward()(
            _pad_heads(q, _next_of(FORWARD_HEADS, q.shape[1])),
            kv_SD.unsqueeze(1),
            indices_RK.unsqueeze(1),
            scale,
            value_dim,
            topk_length=length_R,
        )
        outs.append(out[:, : q.shape[1]])
        lses.append(lse[:, : q.shape[1]])
    return _join_heads(outs), _join_heads(lses)


def sparse_backward(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], indices_RK: Tensor, length_R: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """BF16 ``dq [R, H, D]`` and ``dkv [S, D]`` from ``(q, kv, out, dout, lse)``."""
    q_RHD, kv_SD, out_RHV, dout_RHV, lse_RH = operands
    if not q_RHD.shape[0]:
        return torch.zeros_like(q_RHD), torch.zeros_like(kv_SD)
    dqs: list[Tensor] = []
    dkvs: list[Tensor] = []
    slices = zip(*(_head_slices(x) for x in (q_RHD, out_RHV, dout_RHV, lse_RH)), strict=True)
    for q, out, dout, lse in slices:
        heads = _next_of(BACKWARD_HEADS, q.shape[1])
        sink = torch.full((heads,), -torch.inf, dtype=torch.float32, device=q.device)
        grads = _dsa().sparse_attention_backward_wrapper(
            _pad_heads(q, heads),
            kv_SD,
            _pad_heads(out, heads),
            _pad_heads(dout, heads),
            _pad_heads(lse, heads, torch.inf),
            sink,
            indices_RK,
            softmax_scale=scale,
            topk_length=aligned(length_R),
        )
        dqs.append(grads["dq"][:, : q.shape[1]])
        dkvs.append(grads["dkv"])
    dkv = dkvs[0] if len(dkvs) == 1 else torch.stack(dkvs).float().sum(0).to(kv_SD.dtype)
    return _join_heads(dqs), dkv


def sparse_target(
    q_RHD: Tensor, kv_SD: Tensor, lse_RH: Tensor, indices_RK: Tensor, length_R: Tensor, scale: float
) -> Tensor:
    """FP32 ``[R, K]``: attention probabilities of the selected keys, summed over heads; zeros past the length."""
    if not q_RHD.shape[0]:
        return torch.zeros(indices_RK.shape, dtype=torch.float32, device=q_RHD.device)
    if q_RHD.shape[0] == 1:
        # Its transposed copy of a single row's lse keeps a stride that the kernel refuses: run the row twice.
        twice = (x.expand(2, *x.shape[1:]).contiguous() for x in (q_RHD, lse_RH, indices_RK, length_R))
        q_RHD, lse_RH, indices_RK, length_R = twice
        return sparse_target(q_RHD, kv_SD, lse_RH, indices_RK, length_R, scale)[:1]
    total: Tensor | None = None
    for q, lse in zip(_head_slices(q_RHD), _head_slices(lse_RH), strict=True):
        heads = _next_of(BACKWARD_HEADS, q.shape[1])
        result = _dsa().sparse_attn_score_recompute_wrapper(
            _pad_heads(q, heads).unsqueeze(0),
            kv_SD.unsqueeze(0),
            _pad_heads(lse, heads, torch.inf).unsqueeze(0),
            indices_RK.unsqueeze(0),
            scale,
            topk_length=aligned(length_R).unsqueeze(0),
        )
        # The kernel normalizes each row. A softmax over exactly these keys has a mass of 1 a head.
        part = result["target"].squeeze(0).mul_(q.shape[1])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def dense_target(q_RHD: Tensor, kv_SD: Tensor, lse_RH: Tensor, scale: float, causal_offset: int) -> Tensor:
    """FP32 ``[R, S]``: probabilities summed over heads, row ``i`` over keys ``[0, causal_offset + i]``, then -inf."""
    total: Tensor | None = None
    for q, lse in zip(_head_slices(q_RHD), _head_slices(lse_RH), strict=True):
        heads = _next_of(BACKWARD_HEADS, q.shape[1])
        result = _dsa().dense_attn_score_recompute_wrapper(
            _pad_heads(q, heads).unsqueeze(0),
            kv_SD.view(1, -1, 1, kv_SD.shape[1]),
            _pad_heads(lse, heads, torch.inf).unsqueeze(0),
            scale,
            ratio=1,
            q_causal_offsets=_one_offset(causal_offset, q.device),
        )
        part = result["out"].squeeze(0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def indexer_backward(
    operands: tuple[Tensor, Tensor, Tensor],
    target_RK: Tensor,
    predict_RK: Tensor,
    indices_RK: Tensor,
    grad: Tensor,
) -> IndexerGrads:
    """Gradients of ``grad * sum of rows of KL`` over the selected keys, in ``(q, k, w)``. Overwrites the target."""
    q_RID, k_SD, w_RI = operands
    heads = _next_of(INDEXER_BACKWARD_HEADS, q_RID.shape[1])
    dk_SD = torch.empty(k_SD.shape, dtype=torch.float32, device=k_SD.device)
    grads = _dsa().indexer_backward_wrapper(
        _pad_heads(q_RID, heads).unsqueeze(0),
        _pad_heads(w_RI.to(torch.bfloat16), heads).unsqueeze(0),
        k_SD.unsqueeze(0),
        target_RK.unsqueeze(0),
        predict_RK.unsqueeze(0),
        indices_RK.unsqueeze(0),
        grad.float().reshape(1),
        loss_coeff=float(q_RID.shape[0]),
        d_index_k=dk_SD.unsqueeze(0),
    )
    return _indexer_grads(grads, q_RID.shape[1], dk_SD)


def dense_indexer_backward(
    operands: tuple[Tensor, Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    scores: tuple[Tensor, Tensor],
    causal_offset: int,
) -> IndexerGrads:
    """Gradients of the sum of rows of KL over all visible keys. Overwrites both matrices.

    ``target`` is the un-normalized ``[R, S]`` and its row sums, ``scores`` the index scores and their log-sum-exp.
    """
    q_RID, k_SD, w_RI = operands
    heads = _next_of(INDEXER_BACKWARD_HEADS, q_RID.shape[1])
    dk_SD = torch.empty(k_SD.shape, dtype=torch.float32, device=k_SD.device)
    grads = _dsa().dense_indexer_backward_wrapper(
        _pad_heads(q_RID, heads).unsqueeze(0),
        _pad_heads(w_RI.to(torch.bfloat16), heads).unsqueeze(0),
        k_SD.unsqueeze(0),
        target[0].unsqueeze(0),
        target[1].unsqueeze(0),
        scores[0].unsqueeze(0),
        scores[1].unsqueeze(0),
        torch.ones(1, dtype=torch.float32, device=q_RID.device),
        loss_coeff=float(q_RID.shape[0]),
        ratio=1,
        q_causal_offsets=_one_offset(causal_offset, q_RID.device),
        d_index_k=dk_SD.unsqueeze(0),
    )
    return _indexer_grads(grads, q_RID.shape[1], dk_SD)


def _indexer_grads(grads: Any, heads: int, dk_SD: Tensor) -> IndexerGrads:
    return IndexerGrads(grads["d_index_q"][0, :, :heads], grads["d_weights"][0, :, :heads], dk_SD)


def _dsa() -> Any:
    from cudnn import DSA

    return DSA


def flash_forward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """FlashMLA's sparse prefill, with its SM90 kernels chosen."""
    from flash_mla import flash_mla_sparse_fwd

    if _takes_legacy(flash_mla_sparse_fwd):
        return partial(flash_mla_sparse_fwd, use_legacy=True)
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = flash_mla_sparse_fwd
    return forward


@lru_cache(maxsize=4)
def _takes_legacy(function: Callable[..., Any]) -> bool:
    # Upstream dropped its SM90 kernels in 2026.09.30; sgl-flash-mla keeps them behind this argument.
    return "use_legacy" in signature(function).parameters


def _next_of(allowed: tuple[int, ...], heads: int) -> int:
    return next(size for size in allowed if size >= heads)


def _pad_heads(x: Tensor, heads: int, value: float = 0.0) -> Tensor:
    """Dimension 1 padded to ``heads``; contiguous."""
    missing = heads - x.shape[1]
    if not missing:
        return x.contiguous()
    return F.pad(x, (0,) * (2 * (x.ndim - 2)) + (0, missing), value=value)


def _head_slices(x: Tensor) -> Iterator[Tensor]:
    yield from x.split(SLICE_HEADS, dim=1)


def _join_heads(parts: list[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy where a slice's strides or first address would be refused."""
    return x if x.is_contiguous() and x.data_ptr() % _ALIGN_BYTES == 0 else x.clone()


def _one_offset(causal_offset: int, device: torch.device) -> Tensor:
    # A fill kernel, where torch.tensor would copy from the host and wait for it.
    return torch.full((1,), causal_offset, dtype=torch.int32, device=device)
