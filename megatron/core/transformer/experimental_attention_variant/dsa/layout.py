"""Who sees what: the one description of packing, context parallelism and row slices.

A ``Layout`` is a tuple of segments over token-major rows. Row ``i`` of a segment sees the keys
``[key_start, key_start + causal_offset + (i - row_start) + 1)``: a whole document has offset 0, the second zigzag
chunk of a document has the offset of its first token. Keys are numbered over all documents (in padded order where
documents are padded), whatever rows this rank holds. Rows in no segment are padding: they see nothing.

A ``[b, s]`` batch is ``b`` segments, a packed batch one a document, a zigzag context-parallel shard two a document,
and a row slice (tensor-parallel shard, query chunk) clips segments. Layouts are built from host integers, once a
microbatch; their device views are cached, so no layer synchronizes the device. The views are shared: read them only.

Left out: general attention masks. What a segment cannot say (left padding, prefix LM) is refused at the model's edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

# Of a few microbatches; what is kept is device memory.
_CACHED_VIEWS = 16
_CACHED_ORDERS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one document, see the module docstring. Units: rows and keys."""

    row_start: int
    row_stop: int
    key_start: int
    causal_offset: int

    @property
    def num_rows(self) -> int:
        """Rows of the segment."""
        return self.row_stop - self.row_start

    @property
    def key_stop(self) -> int:
        """End of the keys that the last row sees."""
        return self.key_start + self.causal_offset + self.num_rows


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows, keys and the segments between them. Hashable; equal layouts share their device views.

    Raises:
        ValueError: segments overlap, are out of order, are empty, or reach past the rows or keys.
    """

    num_rows: int
    num_keys: int
    segments: tuple[Segment, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        # Every layer looks views up by layout, and a packed row has thousands of segments: hash them once.
        object.__setattr__(self, "_hash", hash((self.num_rows, self.num_keys, self.segments)))
        if self.num_keys < 0:
            raise ValueError(f"The layout has {self.num_keys} keys; give it 0 or more.")
        row = 0
        for segment in self.segments:
            if segment.row_start < row or segment.num_rows <= 0:
                raise ValueError(
                    f"{segment} overlaps or precedes the segment before it, or is empty; give rows in order."
                )
            if segment.key_start < 0 or segment.causal_offset < 0 or segment.key_stop > self.num_keys:
                raise ValueError(
                    f"{segment} reads keys outside [0, {self.num_keys}); check its key_start and causal_offset."
                )
            row = segment.row_stop
        if row > self.num_rows:
            raise ValueError(f"The last segment ends at row {row} of {self.num_rows}; give the layout more rows.")

    @classmethod
    def causal(cls, batch: int, length: int) -> Layout:
        """``batch`` documents of ``length`` tokens each, batch-major."""
        return cls.packed(tuple(range(0, (batch + 1) * length, length)) if length else (0,))

    @classmethod
    def packed(cls, offsets: Sequence[int], padded_offsets: Sequence[int] | None = None) -> Layout:
        """Documents at cumulative real lengths ``offsets``, laid out at ``padded_offsets`` (default: no padding)."""
        return cls.zigzag(offsets, 1, 0, padded_offsets)

    @classmethod
    def zigzag(
        cls, offsets: Sequence[int], cp_size: int, cp_rank: int, padded_offsets: Sequence[int] | None = None
    ) -> Layout:
        """Rank ``cp_rank``'s shard: chunks ``r`` and ``2 * cp_size - 1 - r`` of each document's ``2 * cp_size`` chunks.

        Raises:
            ValueError: offsets that do not ascend from 0, or padded lengths that are too short or do not divide.
        """
        padded = tuple(offsets if padded_offsets is None else padded_offsets)
        _check_offsets(tuple(offsets), padded, cp_size, cp_rank)
        segments, row = [], 0
        for (start, stop), (key_start, key_stop) in zip(pairwise(offsets), pairwise(padded), strict=True):
            length, chunk = stop - start, key_stop - key_start
            chunk, firsts = (chunk, (0,)) if cp_size == 1 else _zigzag_chunks(chunk, cp_size, cp_rank)
            for first in firsts:
                rows = min(chunk, length - first)
                if rows > 0:
                    segments.append(Segment(row, row + rows, key_start, first))
                row += chunk
        return cls(row, padded[-1], tuple(segments))

    def slice_rows(self, start: int, stop: int) -> Layout:
        """Rows ``[start, stop)`` over the same keys; rows are renumbered from 0."""
        if (start, stop) == (0, self.num_rows):
            return self
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"Rows [{start}, {stop}) were asked of a layout of {self.num_rows}; stay inside it.")
        clipped = []
        for s in self.segments:
            low, high = max(s.row_start, start), min(s.row_stop, stop)
            if low < high:
                clipped.append(Segment(low - start, high - start, s.key_start, s.causal_offset + low - s.row_start))
        return Layout(stop - start, self.num_keys, tuple(clipped))

    @property
    def key_range(self) -> tuple[int, int]:
        """Half-open range that holds every key some row sees; ``(0, 0)`` without segments."""
        if not self.segments:
            return 0, 0
        return min(s.key_start for s in self.segments), max(s.key_stop for s in self.segments)

    @property
    def num_valid_rows(self) -> int:
        """Rows that are no padding."""
        return sum(segment.num_rows for segment in self.segments)


def row_bounds(layout: Layout, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Each row's visible keys ``[start, end)``: two int32 ``[T]`` tensors, equal on padding rows."""
    return _row_bounds(layout, torch.device(device))


def valid_rows(layout: Layout, device: torch.device | str) -> Tensor:
    """Bool ``[T]``: which rows are no padding."""
    return _valid_rows(layout, torch.device(device))


def positions(layout: Layout, device: torch.device | str) -> Tensor:
    """Int64 ``[T]``: position of each row in its document; 0 on padding rows."""
    return _positions(layout, torch.device(device))


def visible_keys(layout: Layout, device: torch.device | str) -> Tensor:
    """Bool ``[S]``: which keys some row sees."""
    return _visible_keys(layout, torch.device(device))


def zigzag_key_order(
    padded_offsets: Sequence[int], cp_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor] | None:
    """Where the keys of all ranks' zigzag rows, rank after rank, stand in global order: ``gathered[order]`` sorts them.

    Returns int64 ``(order, inverse)``, each ``[S]``; None where one rank holds all rows.
    """
    return None if cp_size == 1 else _zigzag_key_order(tuple(padded_offsets), cp_size, torch.device(device))


def send(host: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: a copy from pageable memory would."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


# The views are made outside inference mode and on a named device: an evaluation, or a model built under another default
# device, may be the first to ask, and the next training step gets the same tensors.
@lru_cache(maxsize=_CACHED_VIEWS)
@torch.inference_mode(False)
def _row_bounds(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.zeros(layout.num_rows, dtype=torch.int32, device="cpu")
    ends = torch.zeros(layout.num_rows, dtype=torch.int32, device="cpu")
    for s in layout.segments:
        starts[s.row_start : s.row_stop] = s.key_start
        first_end = s.key_start + s.causal_offset + 1
        ends[s.row_start : s.row_stop] = torch.arange(first_end, first_end + s.num_rows, device="cpu")
    return send(starts, device), send(ends, device)


@lru_cache(maxsize=_CACHED_VIEWS)
@torch.inference_mode(False)
def _valid_rows(layout: Layout, device: torch.device) -> Tensor:
    starts, ends = _row_bounds(layout, device)
    return ends > starts


@lru_cache(maxsize=_CACHED_VIEWS)
@torch.inference_mode(False)
def _positions(layout: Layout, device: torch.device) -> Tensor:
    starts, ends = _row_bounds(layout, device)
    return (ends - starts - 1).clamp_(min=0).long()


@lru_cache(maxsize=_CACHED_VIEWS)
@torch.inference_mode(False)
def _visible_keys(layout: Layout, device: torch.device) -> Tensor:
    seen = torch.zeros(layout.num_keys, dtype=torch.bool, device="cpu")
    for s in layout.segments:
        seen[s.key_start : s.key_stop] = True
    return send(seen, device)


@lru_cache(maxsize=_CACHED_ORDERS)
@torch.inference_mode(False)
def _zigzag_key_order(padded: tuple[int, ...], cp_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    held = []
    for rank in range(cp_size):
        for start, stop in pairwise(padded):
            chunk, firsts = _zigzag_chunks(stop - start, cp_size, rank)
            held += [torch.arange(start + first, start + first + chunk, device="cpu") for first in firsts]
    inverse = torch.cat(held) if held else torch.zeros(0, dtype=torch.int64, device="cpu")
    order = torch.empty_like(inverse)
    order[inverse] = torch.arange(inverse.numel(), device="cpu")
    return send(order, device), send(inverse, device)


def _zigzag_chunks(padded_length: int, cp_size: int, cp_rank: int) -> tuple[int, tuple[int, int]]:
    chunk = padded_length // (2 * cp_size)
    return chunk, (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk)


def _check_offsets(offsets: tuple[int, ...], padded: tuple[int, ...], cp_size: int, cp_rank: int) -> None:
    for name, values in (("offsets", offsets), ("padded_offsets", padded)):
        if not values or values[0] != 0 or any(b < a for a, b in pairwise(values)):
            raise ValueError(f"{name}={values} must start at 0 and never descend; give cumulative lengths.")
    if len(offsets) != len(padded):
        raise ValueError(f"{len(offsets)} offsets but {len(padded)} padded_offsets; give one padded length a document.")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not one of cp_size={cp_size} ranks; use 0 to cp_size - 1.")
    for (a, b), (pa, pb) in zip(pairwise(offsets), pairwise(padded), strict=True):
        if b - a > pb - pa:
            raise ValueError(
                f"A document of {b - a} tokens has {pb - pa} padded ones; make padded lengths at least real ones."
            )
        if cp_size > 1 and (pb - pa) % (2 * cp_size):
            raise ValueError(
                f"A document of {pb - pa} padded tokens does not split into 2 * cp_size = {2 * cp_size} chunks; "
                "pad each document to a multiple of it."
            )
