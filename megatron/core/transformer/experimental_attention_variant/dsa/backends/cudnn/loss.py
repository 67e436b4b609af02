"""The indexer's KL loss on the library's kernels: teachers and losses, sparse (selected keys) and dense (all visible).

Legend: T rows, S keys, H attention heads, I indexer heads, D head width, K selected keys, R rows of one chunk, C keys
that a chunk can see.

Sparse: the teacher is recomputed from the forward's lse, in one chunk; the loss reads the selected scores that
selection kept; gradients are computed in backward from saved operands. Where no scores were kept (replay, recompute),
the given ids are scored first.

Dense: the matrices are S x S, so a chunk's gradients are computed where its matrices exist, in forward, into one buffer
for all chunks, and only scaled in backward.

A pass that will be recomputed runs none of it: its loss is a placeholder that saves as many tensors, of the same
shapes, which is all that autograd compares.

Chunks of the dense loss stay within half of the byte budget. Every segment is a call of its own with its causal offset,
over the keys that its last row sees, so keys of padding and of other documents are never read. Scores go by row lengths
everywhere, so what the scoring kernel leaks past a row's end reaches nothing.

The backward kernels take BF16 head weights and return BF16 weight gradients; the loss itself uses the FP32 ones. Key
gradients are FP32. The log-prediction is floored at -100, as the kernels do (and the reference).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import Layout, Segment
from ...reference import LOG_PREDICTION_FLOOR
from ..protocol import Attended, AttentionInputs, IndexerInputs, TeacherChunk, TopK
from . import frontend
from .scoring import score, segment_calls, split_rows, to_operands

# A chunk holds two FP32 matrices, where selection's 12 bytes a cell also count top-k scratch.
_DENSE_BUDGET_SHARE = 2


def sparse_teacher(attention: AttentionInputs, attended: Attended, topk: TopK, local_rows: int) -> TeacherChunk:
    """Targets of all rows over their selected keys: ``[T, K]``, one chunk."""
    indices_TK = frontend.pad_topk(topk.indices_TK)
    target_TK = frontend.sparse_target(
        frontend.to_bf16(attention.q_THD),
        frontend.to_bf16(attention.kv_SD),
        attended.lse_TH,
        indices_TK,
        topk.length_T,
        attention.scale,
    )
    return TeacherChunk((0, local_rows), None, target_TK[:, : topk.indices_TK.shape[1]])


def dense_teacher(attention: AttentionInputs, layout: Layout, ranks: int, byte_budget: int) -> Iterator[TeacherChunk]:
    """Targets over all visible keys, in chunks of equally many rows of each of ``ranks`` row shards."""
    operands = AttentionInputs(frontend.to_bf16(attention.q_THD), frontend.to_bf16(attention.kv_SD), attention.scale)
    cells = max(byte_budget // (_DENSE_BUDGET_SHARE * frontend.BYTES_A_CELL), 1)
    local = layout.num_rows // ranks
    for start, stop in _dense_chunks(layout, ranks, cells):
        shards = [(rank * local + start, rank * local + stop) for rank in range(ranks)]
        keys = _key_range([layout.slice_rows(*rows) for rows in shards])
        parts = [_dense_target(operands, layout, rows, keys) for rows in shards]
        yield TeacherChunk((start, stop), keys, parts[0] if ranks == 1 else torch.cat(parts))


def sparse_loss(indexer: IndexerInputs, target: TeacherChunk, topk: TopK, scores_TK: Tensor) -> Tensor:
    """KL sum over the selected keys of the chunk's rows."""
    frozen = _Selected(scores_TK, target.target_RN, topk.indices_TK, topk.length_T)
    loss: Tensor = _SparseLoss.apply(indexer.q_TID, indexer.k_SD, indexer.w_TI, frozen)  # type: ignore[no-untyped-call]
    return loss


def dense_loss(indexer: IndexerInputs, targets: Iterable[TeacherChunk], layout: Layout) -> Tensor:
    """KL sum over all visible keys of the targets' rows. The kernels may overwrite the targets."""
    frozen = _Visible(targets, layout, torch.is_grad_enabled())
    loss: Tensor = _DenseLoss.apply(indexer.q_TID, indexer.k_SD, indexer.w_TI, frozen)  # type: ignore[no-untyped-call]
    return loss


def no_loss(indexer: IndexerInputs, topk: TopK, dense: bool) -> Tensor:
    """Zero, in place of a loss that will be recomputed."""
    later = _DenseLater if dense else _SparseLater
    loss: Tensor = later.apply(indexer.q_TID, indexer.k_SD, indexer.w_TI, topk)  # type: ignore[no-untyped-call]
    return loss


class _Selected(NamedTuple):
    scores_TK: Tensor
    target_TK: Tensor
    indices_TK: Tensor
    length_T: Tensor


class _Visible(NamedTuple):
    targets: Iterable[TeacherChunk]
    layout: Layout
    with_grads: bool


class _SparseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TID: Tensor, k_SD: Tensor, w_TI: Tensor, frozen: _Selected) -> Tensor:
        from . import triton_rows

        kl_T, lse_T, mass_T = triton_rows.kl_rows(
            frozen.target_TK, frozen.scores_TK, frozen.length_T, LOG_PREDICTION_FLOOR
        )
        ctx.save_for_backward(q_TID, k_SD, w_TI, *frozen, lse_T, mass_T)
        return kl_T.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from . import triton_rows

        q_TID, k_SD, w_TI, scores_TK, target_TK, indices_TK, length_T, lse_T, mass_T = ctx.saved_tensors
        operands = to_operands(IndexerInputs(q_TID, k_SD, w_TI))
        indices_TK = frontend.pad_topk(indices_TK)
        dq_TID, dw_TI = torch.empty_like(operands.q_TID), torch.empty_like(operands.w_TI)
        dk_SD = torch.zeros(k_SD.shape, dtype=torch.float32, device=k_SD.device)
        step = _sparse_rows(indices_TK.shape[1])
        for start in range(0, q_TID.shape[0], step):
            rows = slice(start, min(start + step, q_TID.shape[0]))
            stats = length_T[rows], lse_T[rows], mass_T[rows]
            target, predict = triton_rows.backward_rows(
                target_TK[rows], scores_TK[rows], stats, indices_TK.shape[1], LOG_PREDICTION_FLOOR
            )
            chunk = operands.q_TID[rows], operands.k_SD, operands.w_TI[rows]
            part = frontend.indexer_backward(chunk, target, predict, indices_TK[rows], grads[0])
            dq_TID[rows], dw_TI[rows] = part.dq_RID, part.dw_RI
            dk_SD += part.dk_SD
        return dq_TID.to(q_TID.dtype), dk_SD.to(k_SD.dtype), dw_TI.to(w_TI.dtype), None


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TID: Tensor, k_SD: Tensor, w_TI: Tensor, frozen: _Visible) -> Tensor:
        operands = to_operands(IndexerInputs(q_TID, k_SD, w_TI))
        grads = _zero_grads(operands) if frozen.with_grads and any(ctx.needs_input_grad) else None
        loss = torch.zeros((), dtype=torch.float32, device=q_TID.device)
        for target in frozen.targets:
            rows = slice(*target.rows)
            part = None
            if grads is not None:
                part = frontend.IndexerGrads(grads.dq_RID[rows], grads.dw_RI[rows], grads.dk_SD)
            loss += _dense_chunk(operands.rows(*target.rows), target, frozen.layout.slice_rows(*target.rows), part)
        if grads is not None:
            ctx.save_for_backward(*grads)
        ctx.dtypes = q_TID.dtype, k_SD.dtype, w_TI.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq_TID, dw_TI, dk_SD = ctx.saved_tensors
        q_dtype, k_dtype, w_dtype = ctx.dtypes
        scaled = (dq_TID * grads[0]).to(q_dtype), (dk_SD * grads[0]).to(k_dtype), (dw_TI * grads[0]).to(w_dtype)
        return *scaled, None


class _SparseLater(_SparseLoss):
    """First pass of two: this graph's backward reads what the second pass saves. Zeros stand for it without memory."""

    @staticmethod
    def forward(ctx: Any, q_TID: Tensor, k_SD: Tensor, w_TI: Tensor, topk: TopK) -> Tensor:  # type: ignore[override]
        zero = torch.zeros((), dtype=torch.float32, device=q_TID.device)
        matrix, column = zero.expand(topk.indices_TK.shape), zero.expand(topk.length_T.shape)
        ctx.save_for_backward(q_TID, k_SD, w_TI, matrix, matrix, topk.indices_TK, topk.length_T, column, column)
        return zero.clone()


class _DenseLater(_DenseLoss):
    """The same for the dense loss."""

    @staticmethod
    def forward(ctx: Any, q_TID: Tensor, k_SD: Tensor, w_TI: Tensor, topk: TopK) -> Tensor:  # type: ignore[override]
        zero = torch.zeros((), dtype=torch.float32, device=q_TID.device)
        ctx.save_for_backward(zero.bfloat16().expand_as(q_TID), zero.expand_as(w_TI), zero.expand_as(k_SD))
        ctx.dtypes = q_TID.dtype, k_SD.dtype, w_TI.dtype
        return zero.clone()


def _zero_grads(operands: IndexerInputs) -> frontend.IndexerGrads:
    return frontend.IndexerGrads(
        torch.zeros_like(operands.q_TID),
        torch.zeros_like(operands.w_TI),
        torch.zeros(operands.k_SD.shape, dtype=torch.float32, device=operands.k_SD.device),
    )


def _dense_chunk(
    operands: IndexerInputs, target: TeacherChunk, layout: Layout, grads: frontend.IndexerGrads | None
) -> Tensor:
    """KL sum of a chunk's rows, which all but ``target`` count from 0; adds to the gradients of all keys."""
    assert target.keys is not None
    loss = torch.zeros((), dtype=torch.float32, device=target.target_RN.device)
    for segment, call in zip(layout.segments, segment_calls(layout, loss.device), strict=True):
        rows, first = slice(segment.row_start, segment.row_stop), target.keys[0]
        columns = slice(segment.key_start - first, segment.key_stop - first)
        matrices = frontend.aligned(target.target_RN[rows, columns]), score(operands, call)
        part = grads and frontend.IndexerGrads(
            grads.dq_RID[rows], grads.dw_RI[rows], grads.dk_SD[segment.key_start : segment.key_stop]
        )
        loss += _dense_segment(operands, segment, matrices, part)
    return loss


def _dense_segment(
    operands: IndexerInputs, segment: Segment, matrices: tuple[Tensor, Tensor], grads: frontend.IndexerGrads | None
) -> Tensor:
    """KL sum of one segment's rows; fills ``grads`` (views of its rows and keys), adding to the keys'."""
    from . import triton_rows

    target_RC, scores_RC = matrices
    first = segment.causal_offset + 1
    length_R = torch.arange(first, first + segment.num_rows, dtype=torch.int32, device=target_RC.device)
    kl_R, lse_R, mass_R = triton_rows.kl_rows(target_RC, scores_RC, length_R, LOG_PREDICTION_FLOOR)
    if grads is not None:
        rows = slice(segment.row_start, segment.row_stop)
        part = frontend.dense_indexer_backward(
            (operands.q_TID[rows], operands.k_SD[segment.key_start : segment.key_stop], operands.w_TI[rows]),
            (target_RC, mass_R),
            (scores_RC, lse_R),
            segment.causal_offset,
        )
        grads.dq_RID.copy_(part.dq_RID)
        grads.dw_RI.copy_(part.dw_RI)
        grads.dk_SD.add_(part.dk_SD)
    return kl_R.sum()


def _dense_target(attention: AttentionInputs, layout: Layout, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Un-normalized targets of ``rows`` over ``keys``; -inf or 0 where a row does not see a key."""
    shard = layout.slice_rows(*rows)
    first_row, (first, last) = rows[0], keys
    target: Tensor | None = None
    for segment in shard.segments:
        q_RHD = attention.q_THD[first_row + segment.row_start : first_row + segment.row_stop].contiguous()
        kv_CD = attention.kv_SD[segment.key_start : segment.key_stop]
        lse_RH = _visible_lse(q_RHD, kv_CD, attention.scale, segment.causal_offset)
        part = frontend.dense_target(q_RHD, kv_CD, lse_RH, attention.scale, segment.causal_offset)
        if part.shape == (shard.num_rows, last - first):
            return part
        if target is None:
            target = part.new_zeros((shard.num_rows, last - first))
        target[segment.row_start : segment.row_stop, segment.key_start - first : segment.key_stop - first] = part
    return attention.q_THD.new_zeros((shard.num_rows, last - first), dtype=torch.float32) if target is None else target


def _visible_lse(q_RHD: Tensor, kv_CD: Tensor, scale: float, causal_offset: int) -> Tensor:
    from . import triton_lse

    return triton_lse.visible_lse(q_RHD, kv_CD, scale, causal_offset)


def _dense_chunks(layout: Layout, ranks: int, cells: int) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of one shard, each with at most ``cells`` cells of its ranks' rows times the keys they see.

    A rank of nothing but padding has none.
    """
    if ranks == 1:
        yield from _segment_chunks(layout, cells)
        return
    local = layout.num_rows // ranks
    step = max(cells // max(ranks * layout.num_keys, 1), 1)
    for start in range(0, local, step):
        yield start, min(start + step, local)


def _segment_chunks(layout: Layout, cells: int) -> Iterator[tuple[int, int]]:
    """Chunks that follow the segments, which leaves out the padding at either end.

    Short documents share one.
    """
    group: list[Segment] = []
    for segment in layout.segments:
        joint = [*group, segment]
        keys = max(s.key_stop for s in joint) - min(s.key_start for s in joint)
        if group and (segment.row_stop - group[0].row_start) * keys > cells:
            yield group[0].row_start, group[-1].row_stop
            joint = [segment]
        if segment.num_rows * (segment.key_stop - segment.key_start) > cells:
            yield from ((piece.row_start, piece.row_stop) for piece in split_rows(segment, cells))
            joint = []
        group = joint
    if group:
        yield group[0].row_start, group[-1].row_stop


def _key_range(shards: list[Layout]) -> tuple[int, int]:
    ranges = [shard.key_range for shard in shards if shard.segments]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0, 0)


def _sparse_rows(width: int) -> int:
    # Two FP32 matrices of a chunk: 128 MiB at the widest selection.
    return max(2**24 // width, 1)
