"""Selection of the best-scored keys, call by call: score, top-k by row lengths, ids made global.

Legend: T rows, K selected keys.

The kernel's deterministic mode already returns ids ascending, then -1, with ties at the lowest id, so nothing is
sorted, compacted or read back to the host. It goes by lengths, and a row of padding has length 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import Layout, row_bounds
from ..protocol import IndexerInputs, QuantizedInputs, TopK
from . import frontend
from .scoring import Call, plan, score


def select(
    operands: IndexerInputs | QuantizedInputs, layout: Layout, k: int, with_scores: bool, byte_budget: int
) -> TopK:
    """The ``k`` best visible keys of each row (see the protocol); scores are kept only if asked for."""
    device = operands.w_TI.device
    starts_T, ends_T = row_bounds(layout, device)
    visible_T = ends_T - starts_T
    planned = plan(layout, device, byte_budget)
    indices_TK, scores_TK = None, None
    for call in planned.calls:
        rows = slice(call.start, call.stop)
        ids, values = frontend.top_k(score(operands, call), visible_T[rows], k, with_scores)
        ids = _to_global(ids, call, starts_T)
        if call.stop - call.start == layout.num_rows:
            indices_TK, scores_TK = ids, values
            break
        if indices_TK is None:
            indices_TK, scores_TK = _buffers(layout, ids, values, planned.covers_all_rows)
        indices_TK[rows] = ids
        if values is not None and scores_TK is not None:
            scores_TK[rows] = values
    if indices_TK is None:  # nothing but padding
        indices_TK = torch.full((layout.num_rows, k), -1, dtype=torch.int32, device=device)
        scores_TK = torch.zeros(indices_TK.shape, dtype=torch.float32, device=device) if with_scores else None
    return TopK(indices_TK, visible_T.clamp(max=k), scores_TK)


def scores_of(
    operands: IndexerInputs | QuantizedInputs, layout: Layout, indices_TK: Tensor, byte_budget: int
) -> Tensor:
    """FP32 scores ``[T, K]`` of given ids (replay): the same numbers that selecting them would have given."""
    device = operands.w_TI.device
    starts_T, _ = row_bounds(layout, device)
    scores_TK = torch.zeros(indices_TK.shape, dtype=torch.float32, device=device)
    for call in plan(layout, device, byte_budget).calls:
        rows = slice(call.start, call.stop)
        columns = (indices_TK[rows] - starts_T[rows, None]).clamp(min=0).long()
        scores_TK[rows] = score(operands, call).gather(1, columns)
    return scores_TK


def _to_global(ids_RK: Tensor, call: Call, starts_T: Tensor) -> Tensor:
    if call.first_key == 0:
        return ids_RK
    first = starts_T[call.start : call.stop, None] if call.first_key is None else call.first_key
    return torch.where(ids_RK < 0, ids_RK, ids_RK + first)


def _buffers(layout: Layout, ids: Tensor, values: Tensor | None, covered: bool) -> tuple[Tensor, Tensor | None]:
    shape = (layout.num_rows, ids.shape[1])
    indices_TK = ids.new_empty(shape) if covered else ids.new_full(shape, -1)
    return indices_TK, None if values is None else values.new_empty(shape)
