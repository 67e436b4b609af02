"""Selected keys on disk: recorded by one run or engine, compared with or replayed by another.

Recorded ids are global to one rank's flattened keys and mean nothing elsewhere. A file (``selection_file.py``) holds
document-local positions, by layer and document; documents count in the order of their keys, empty ones left out.
Packing, padding, batch shape and context parallelism are a ``Layout``'s business: ``save_topk`` takes rows out of one,
``load_topk`` puts them into another.

With a process group, saving gathers the rows of all its ranks (tensor- and context-parallel) one layer at a time, and
the group's first rank writes; what goes wrong there is raised on every rank. Left out: scores, which replay computes
anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .backends.protocol import TopK
from .index_share import TopKRecord, different_segments
from .layout import Layout, Segment
from .selection_file import SavedTopK, read_topk, write_topk

_NOBODY = -2  # holds a row; -1 is a rank that did not say which


class _Document(NamedTuple):
    key_start: int
    tokens: int


class _Shard(NamedTuple):
    """What a rank says of its rows before it sends them."""

    layout: Layout
    first_holder: int | None
    layers: list[int]
    width: int


def save_topk(
    path: str | Path,
    record: Mapping[int, TopK],
    layout: Layout | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what ``record_topk`` recorded in one forward pass.

    Args:
        path: the file; an existing one is replaced.
        record: selections by layer number.
        layout: the layout of that pass on this rank; None takes the one that ``record_topk`` left in ``record``.
        group: all ranks that hold rows of these documents (``ProcessGroupCollection.tp_cp``); every one of them must
            call. None where this rank holds all rows.

    Raises:
        ValueError: rows are missing, ranks disagree about one or hold other documents, or the record is of another
            pass.
        OSError: the file cannot be written.
    """
    shards = _all_gather(_describe(record, layout), group)
    _raise_first(shard for shard in shards if isinstance(shard, ValueError))
    documents = _documents(shards)
    gathered = (_gather(record[layer].indices_TK.cpu(), group) for layer in sorted(record))
    failure: Exception | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            _write(Path(path), shards, documents, gathered)
        except (OSError, ValueError) as error:
            failure = error
    for _ in gathered:  # the other ranks' part in the gathers, and the rest of them after a failure
        pass
    _raise_first([_broadcast(failure, group)])


def load_topk(
    path: str | Path, layout: Layout, device: torch.device | str = "cpu", documents: Sequence[int] | None = None
) -> TopKRecord:
    """Read selections for ``replay_topk``, as ids of the present layout's keys.

    Args:
        path: a file of ``save_topk`` or of an inference engine.
        layout: the layout of the pass that will replay, on this rank.
        device: where the tensors go.
        documents: which of the file's documents the layout holds, in the layout's order. None means all, in order; a
            context-parallel rank without any row of some document has to say so. A document may end earlier than in
            the file: what its remaining tokens selected does not depend on that.

    Raises:
        ValueError: the file is damaged, its documents are not the layout's, or it holds an impossible selection.
        OSError: the file cannot be read.
    """
    saved = read_topk(path)
    segments = _match(saved, layout, documents)
    selections = {layer: _to_layout(saved, layer, segments, layout.num_rows, device) for layer in saved.layers}
    return TopKRecord(selections, layout)


def _describe(record: Mapping[int, TopK], layout: Layout | None) -> _Shard | ValueError:
    """This rank's shard, or what is wrong with it: an error travels to the other ranks, which would wait."""
    if not record:
        return ValueError("Nothing was recorded: run a forward pass in record_topk before saving.")
    first_holder = None
    if isinstance(record, TopKRecord):
        if layout and record.layout and different_segments(record.layout, layout):
            return ValueError(
                "The layout is of other segments than the pass that was recorded: save without a layout, the record "
                "holds its own."
            )
        layout, first_holder = layout or record.layout, record.first_holder
    if layout is None:
        return ValueError(
            f"The record is a {type(record).__name__} that does not say which rows and keys it counts: save what "
            "record_topk yields, or pass the layout of the recorded pass."
        )
    for layer, topk in record.items():
        if topk.indices_TK.shape[0] != layout.num_rows:
            return ValueError(
                f"Layer {layer} recorded {topk.indices_TK.shape[0]} rows, but the layout has {layout.num_rows}: save "
                "with the layout of the recorded pass."
            )
    width = max(topk.indices_TK.shape[1] for topk in record.values())
    return _Shard(layout, first_holder, sorted(record), width)


def _raise_first(failures: Iterable[Exception | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


def _documents(shards: Sequence[_Shard]) -> list[_Document]:
    """The documents of all shards, in the order of their keys; every token's row must be in some shard."""
    if any(shard.layers != shards[0].layers for shard in shards):
        raise ValueError(
            f"The ranks recorded layers {[shard.layers for shard in shards]}: record the same pass on all."
        )
    segments: dict[int, list[tuple[Segment, int]]] = {}
    for segment, holder in ((s, shard.first_holder) for shard in shards for s in shard.layout.segments):
        segments.setdefault(segment.key_start, []).append((segment, -1 if holder is None else holder))
    documents = []
    for number, key_start in enumerate(sorted(segments)):
        tokens = max(s.key_stop for s, _ in segments[key_start]) - key_start
        holders = torch.full((tokens,), _NOBODY)
        for s, holder in segments[key_start]:
            own = holders[s.causal_offset : s.causal_offset + s.num_rows]
            _require_peers(own, holder, number)
            own.fill_(holder)
        if (holders == _NOBODY).any():
            raise ValueError(
                f"No rank that saves holds token {int((holders == _NOBODY).int().argmax())} of document {number}: pass "
                "the process group of all ranks that share these documents."
            )
        documents.append(_Document(key_start, tokens))
    return documents


def _require_peers(held: Tensor, holder: int, number: int) -> None:
    """Equal rows are one pass's on tensor-parallel ranks alone; on others they are another sample's."""
    others = held[(held != _NOBODY) & (held != holder)]
    if others.numel():
        raise ValueError(
            f"Ranks {int(others[0])} and {holder} both hold rows of document {number} without being tensor-parallel "
            "ranks of each other, so they ran other documents (data parallelism): pass the group of the ranks that "
            "share one pass's documents, ProcessGroupCollection.tp_cp."
        )


def _write(
    path: Path, shards: Sequence[_Shard], documents: Sequence[_Document], gathered: Iterable[list[Tensor]]
) -> None:
    """The file, from the ids that each shard sent for a layer, layer after layer."""
    width = max(shard.width for shard in shards)
    layouts = [shard.layout for shard in shards]
    shapes = {(n, m): (d.tokens, min(width, d.tokens)) for n in shards[0].layers for m, d in enumerate(documents)}
    write_topk(path, shapes, width, _positions(gathered, layouts, documents, width))


def _positions(
    gathered: Iterable[list[Tensor]], layouts: Sequence[Layout], documents: Sequence[_Document], width: int
) -> Iterator[Tensor]:
    """Int32 ``[tokens, K]`` of each layer's documents, from the shards' ids."""
    for shards in gathered:
        for number, document in enumerate(documents):
            columns = min(width, document.tokens)
            rows = torch.full((document.tokens, columns), -1, dtype=torch.int32)
            held = torch.zeros(document.tokens, dtype=torch.bool)
            for ids_TK, layout in zip(shards, layouts, strict=True):
                for s in (s for s in layout.segments if s.key_start == document.key_start):
                    own = slice(s.causal_offset, s.causal_offset + s.num_rows)
                    ids = F.pad(ids_TK[s.row_start : s.row_stop], (0, width - ids_TK.shape[1]), value=-1)[:, :columns]
                    ids = _within_document(ids, s, number)
                    if (held[own, None] & (rows[own] != ids)).any():
                        raise ValueError(
                            f"Two ranks hold the same rows of document {number} with different keys: leave "
                            "data-parallel ranks out of the group, and where it has none, compare the ranks' weights "
                            "and inputs."
                        )
                    rows[own], held[own] = ids, True
            yield rows


def _within_document(ids_TK: Tensor, segment: Segment, number: int) -> Tensor:
    """Int32 positions of a segment's ids in its document."""
    positions = torch.where(ids_TK < 0, -1, ids_TK - segment.key_start)
    tokens = torch.arange(segment.causal_offset, segment.causal_offset + segment.num_rows)
    foreign = (((ids_TK >= 0) & (positions < 0)) | (positions > tokens[:, None])).any(-1)
    if foreign.any():
        raise ValueError(
            f"Token {int(tokens[foreign][0])} of document {number} selected keys that this layout hides from it: save "
            "with the layout of the recorded pass."
        )
    return positions.int()


def _match(saved: SavedTopK, layout: Layout, documents: Sequence[int] | None) -> list[tuple[Segment, int]]:
    """Each segment of the layout with the number of its document in the file."""
    starts = sorted({s.key_start for s in layout.segments})
    numbers = list(range(len(saved.tokens)) if documents is None else documents)
    if len(numbers) != len(starts):
        raise ValueError(
            f"{saved.path} gives {len(numbers)} documents to a layout with rows of {len(starts)}: say by documents=... "
            "which of the file's documents they are, in the layout's order."
        )
    unknown = [n for n in numbers if not 0 <= n < len(saved.tokens)]
    if unknown:
        raise ValueError(f"{saved.path} has no document {unknown[0]}: it holds documents 0 to {len(saved.tokens) - 1}.")
    number_at = dict(zip(starts, numbers, strict=True))
    for s in layout.segments:
        number, tokens = number_at[s.key_start], s.key_stop - s.key_start
        if tokens > saved.tokens[number]:
            raise ValueError(
                f"Document {number} of {saved.path} has {saved.tokens[number]} tokens, but the layout asks for "
                f"{tokens}: load the file of this batch."
            )
    return [(s, number_at[s.key_start]) for s in layout.segments]


def _to_layout(
    saved: SavedTopK, layer: int, segments: list[tuple[Segment, int]], num_rows: int, device: torch.device | str
) -> TopK:
    indices_TK = torch.full((num_rows, saved.topk), -1, dtype=torch.int32)
    length_T = torch.zeros(num_rows, dtype=torch.int32)
    for s, number in segments:
        for first, ids in saved.blocks(layer, number, s.causal_offset, s.causal_offset + s.num_rows):
            row = s.row_start + first - s.causal_offset
            rows = slice(row, row + ids.shape[0])
            indices_TK[rows, : ids.shape[1]] = torch.where(ids < 0, -1, ids + s.key_start)
            length_T[rows] = (ids >= 0).sum(-1, dtype=torch.int32)
    return TopK(indices_TK.to(device), length_T.to(device), None)


def _all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _gather(value: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor on the group's first rank; nothing on the others."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, values, dst=dist.get_global_rank(group, 0), group=group)
    return values or []


def _broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's value on every rank."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]
