"""Index scores: the one place where they come from, and the plan of the calls that produce them.

Legend: T rows, S keys, I indexer heads, D head width, R rows of one call.

``score`` is the only caller of the scoring kernel; selection, the dense loss and replay all go through it. Precision
is the operands' type: tensors rounded to BF16, whatever dtype carried them, or FP8 codes with their scales
(``Quantized``); the head weights stay FP32.

A ``Plan`` cuts a layout into calls once a microbatch (cached, with its device vectors sent in one copy). A segment
whose scores exceed the byte budget is cut by rows, and each piece reads only the keys that its last row sees. Smaller
segments share one variable-length call as long as the rectangle (all rows, times the longest segment) is at most
about twice the work, so that many short documents cost few launches and one long document does not inflate the rest.
Rows of padding between segments ride along with length 0; rows at either end of a call are in none.

Where the segments of a call own runs of keys that follow one another, the keys are a view; else (zigzag shards see the
same keys twice) the call gathers its own copy, 256 bytes a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor

from ...config import DSAConfig
from ...layout import Layout, Segment, send
from ...precision import quantize_operands
from ...quantization import Quantized, quantize_e4m3
from ..protocol import IndexerInputs, QuantizedInputs
from .frontend import BYTES_A_CELL, MAX_SEGMENTS_A_CALL, Segments, score_segments, to_bf16

BYTE_BUDGET = 2 * 2**30
# A call may waste this many cells whatever its work: below it, launches cost more than arithmetic.
_FREE_CELLS = 2**20
_ROW_MULTIPLE = 64
_KEY_MULTIPLE = 8
# A plan may hold gathered key ids, device memory; the calls of a dense chunk hold a few numbers each.
_CACHED_PLANS = 8
_CACHED_CALLS = 256


@dataclass(frozen=True, eq=False)
class Call:
    """One launch: rows ``[start, stop)``, the keys they need, and the segments among them.

    Attributes:
        keys: half-open range of the flattened keys, or int64 ids to gather.
        first_key: the first key of every row of the call, or None where it differs from segment to segment.
    """

    start: int
    stop: int
    keys: tuple[int, int] | Tensor
    first_key: int | None
    segments: Segments


@dataclass(frozen=True, eq=False)
class Plan:
    """The calls of a layout, in row order; rows in none of them are padding."""

    calls: tuple[Call, ...]
    covers_all_rows: bool


def scoring_operands(indexer: IndexerInputs, config: DSAConfig) -> IndexerInputs | QuantizedInputs:
    """q and k in the precision that ``config`` scores in; contiguous, without gradients."""
    if config.scoring_precision != "fp8":
        return to_operands(indexer)
    quantize = _quantizer(indexer.q_TID.device)
    return quantize_operands(indexer, config.fp8_scale_format, config.fp8_check_finite, quantize)


def to_operands(indexer: IndexerInputs) -> IndexerInputs:
    """q and k rounded to BF16, which is what trains; contiguous, without gradients."""
    return IndexerInputs(
        to_bf16(indexer.q_TID),
        to_bf16(indexer.k_SD),
        indexer.w_TI.detach().float().contiguous(),
    )


def score(operands: IndexerInputs | QuantizedInputs, call: Call) -> Tensor:
    """FP32 scores ``[R, max_k]`` of a call's rows, column 0 being each row's first key.

    What lies past a row's last visible key is not specified: go by lengths.
    """
    rows = slice(call.start, call.stop)
    keys = call.keys if isinstance(call.keys, Tensor) else slice(*call.keys)
    return score_segments(_take(operands.q_TID, rows), _take(operands.k_SD, keys), operands.w_TI[rows], call.segments)


# Made outside inference mode: an evaluation may be the first to ask, and the next training step gets the same tensors.
@lru_cache(maxsize=_CACHED_PLANS)
@torch.inference_mode(False)
def plan(layout: Layout, device: torch.device, byte_budget: int) -> Plan:
    """Calls whose scores and top-k scratch stay within ``byte_budget`` bytes each (one row at the least)."""
    groups = list(_groups(layout, max(byte_budget // BYTES_A_CELL, 1)))
    covered = [(group[0].row_start, stop) for group, stop in groups]
    whole = [0, *(row for rows in covered for row in rows), layout.num_rows]
    return Plan(
        _build_calls(groups, device, _KEY_MULTIPLE),
        all(a == b for a, b in zip(whole[::2], whole[1::2], strict=True)) and bool(groups),
    )


@lru_cache(maxsize=_CACHED_CALLS)
@torch.inference_mode(False)
def segment_calls(layout: Layout, device: torch.device) -> tuple[Call, ...]:
    """One call for each segment, as wide as its last row sees."""
    return _build_calls([([segment], segment.row_stop) for segment in layout.segments], device, 1)


def split_rows(segment: Segment, cells: int) -> Iterator[Segment]:
    """Pieces of a segment, each of at most ``cells`` rows times visible keys (but at least a few rows)."""
    start = segment.row_start
    while start < segment.row_stop:
        seen = segment.causal_offset + start - segment.row_start
        # rows * (seen + rows) <= cells
        rows = (isqrt(seen * seen + 4 * cells) - seen) // 2
        rows = max(rows // _ROW_MULTIPLE * _ROW_MULTIPLE, _ROW_MULTIPLE)
        stop = min(start + rows, segment.row_stop)
        yield Segment(start, stop, segment.key_start, seen)
        start = stop


def _quantizer(device: torch.device) -> Callable[[Tensor, str, bool], Quantized]:
    if device.type != "cuda":
        return quantize_e4m3
    from . import quantize  # needs Triton

    return quantize.quantize_e4m3


def _take(operand: Tensor | Quantized, at: slice | Tensor) -> Tensor | Quantized:
    """Rows of an operand, as a view where they follow one another."""
    if isinstance(operand, Quantized):
        values, scale = _take(operand.values, at), _take(operand.scale, at)
        assert isinstance(values, Tensor) and isinstance(scale, Tensor)
        return Quantized(values, scale)
    if isinstance(at, slice):
        return operand[at]
    if operand.dtype == torch.float8_e4m3fn:  # has no gather of its own
        return operand.view(torch.uint8).index_select(0, at).view(operand.dtype)
    return operand.index_select(0, at)


def _groups(layout: Layout, cells: int) -> Iterator[tuple[list[Segment], int]]:
    """Segments that share a call, and the row after the last one."""
    group: list[Segment] = []
    width = work = 0
    for segment in layout.segments:
        own, joint_width = segment.num_rows * _width(segment), max(width, _width(segment))
        if group:
            joint = (segment.row_stop - group[0].row_start) * joint_width
            fits = joint <= min(cells, 2 * (work + own) + _FREE_CELLS) and len(group) < MAX_SEGMENTS_A_CALL
            if not fits:
                yield group, group[-1].row_stop
                group, work, joint_width = [], 0, _width(segment)
        if own > cells:  # then it fitted no group
            for piece in split_rows(segment, cells):
                yield [piece], piece.row_stop
            width = 0
            continue
        group.append(segment)
        width, work = joint_width, work + own
    if group:
        yield group, group[-1].row_stop


def _width(segment: Segment) -> int:
    return segment.key_stop - segment.key_start


def _build_calls(groups: list[tuple[list[Segment], int]], device: torch.device, key_multiple: int) -> tuple[Call, ...]:
    vectors: list[list[int]] = []
    for group, stop in groups:
        first = group[0].row_start
        vectors.append([s.row_start - first for s in group] + [stop - first])
        vectors.append(_key_offsets(group))
        vectors.append([s.causal_offset for s in group])
    on_device = _send_together(vectors, device)
    calls = []
    for (group, stop), cu_q, cu_k, offsets, rows, keys in zip(
        groups, on_device[::3], on_device[1::3], on_device[2::3], vectors[::3], vectors[1::3], strict=True
    ):
        max_q = max(b - a for a, b in pairwise(rows))
        widest = max(b - a for a, b in pairwise(keys))
        segments = Segments(cu_q, cu_k, offsets, max_q, -(-widest // key_multiple) * key_multiple)
        firsts = {s.key_start for s in group}
        calls.append(
            Call(
                group[0].row_start,
                stop,
                _keys_of(group, device),
                group[0].key_start if len(firsts) == 1 else None,
                segments,
            )
        )
    return tuple(calls)


def _in_place(group: list[Segment]) -> bool:
    """Whether each segment's keys end before the next one's begin: then a gap belongs to the segment before it."""
    return all(a.key_stop <= b.key_start for a, b in pairwise(group))


def _key_offsets(group: list[Segment]) -> list[int]:
    if _in_place(group):
        return [s.key_start - group[0].key_start for s in group] + [group[-1].key_stop - group[0].key_start]
    offsets = [0]
    for segment in group:
        offsets.append(offsets[-1] + _width(segment))
    return offsets


def _keys_of(group: list[Segment], device: torch.device) -> tuple[int, int] | Tensor:
    if _in_place(group):
        return group[0].key_start, group[-1].key_stop
    return torch.cat([torch.arange(s.key_start, s.key_stop, device=device) for s in group])


def _send_together(vectors: list[list[int]], device: torch.device) -> list[Tensor]:
    """All vectors to the device in one copy; each starts at a 16-byte boundary."""
    flat: list[int] = []
    places = []
    for vector in vectors:
        places.append((len(flat), len(flat) + len(vector)))
        flat += vector + [0] * (-len(vector) % 4)
    sent = send(torch.tensor(flat, dtype=torch.int32, device="cpu"), device)
    return [sent[start:stop] for start, stop in places]
