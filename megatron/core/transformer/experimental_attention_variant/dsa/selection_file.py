"""The file that selected keys are kept in: for each (layer, document), which earlier tokens each token attends to.

A plain safetensors file. Tensor ``layer.N.document.M`` is ``[tokens, K]`` of int32 (int64 is read too): row ``p`` holds
the document-local positions that token ``p`` attends to, then -1; rows may be in any order. Layers are 1-based, and
only those that select are there; documents count from 0 and are the same in every layer. The metadata entry ``topk`` is
the width that the model selects (rows of a shorter document need no more columns than it has tokens). An inference
engine writes that in a few lines with the safetensors library; here the format (a JSON header, then raw bytes) is
written and read by hand, because this folder depends on torch alone.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAME = re.compile(r"layer\.(\d+)\.document\.(\d+)")
_DTYPES = {"I32": torch.int32, "I64": torch.int64}
_BLOCK_ROWS = 1024
_LAST = torch.iinfo(torch.int32).max  # stands for -1 where rows are sorted


class _Place(NamedTuple):
    """A tensor in the file: its type, shape and first byte."""

    dtype: torch.dtype
    tokens: int
    width: int
    start: int

    @property
    def size(self) -> int:
        return self.tokens * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class SavedTopK:
    """An open selection file; tensors are read when asked for.

    Attributes:
        path: the file.
        layers: layer numbers, ascending.
        tokens: length of each document.
        topk: keys that a row selects at most.
    """

    path: Path
    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    topk: int
    _places: Mapping[tuple[int, int], _Place]

    def blocks(self, layer: int, document: int, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Read tokens ``[start, stop)`` and no others: a block's first token, and int32 ``[tokens, K]``.

        Rows hold ascending document-local positions, then -1.

        Raises:
            ValueError: a row selects nothing, a key twice, or a key that it cannot see.
        """
        for first in range(start, stop, _BLOCK_ROWS):
            yield first, self._block(layer, document, first, min(first + _BLOCK_ROWS, stop))

    def _block(self, layer: int, document: int, start: int, stop: int) -> Tensor:
        place = self._places[layer, document]
        row = place.width * place.dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(place.start + start * row)
            data = bytearray(file.read((stop - start) * row))
        ids = torch.frombuffer(data, dtype=place.dtype).reshape(stop - start, place.width)
        good = (ids.amin(-1) >= -1) & (ids.amax(-1) <= torch.arange(start, stop))
        ids = ids.int()
        if not _ascends(ids).all():
            ids = ids.masked_fill(ids == -1, _LAST).sort(dim=-1).values
            ids.masked_fill_(ids == _LAST, -1)
        good &= _ascends(ids)
        if not good.all():
            raise ValueError(
                f"{self.path}: token {start + int((~good).int().argmax())} of layer {layer}, document {document} "
                "selects no key, one key twice, or one that it cannot see: give positions from the document's start up "
                "to the token."
            )
        return ids


def _ascends(ids: Tensor) -> Tensor:
    """Which rows are one or more ascending positions, then -1."""
    earlier, later = ids[:, :-1], ids[:, 1:]
    return (ids[:, 0] >= 0) & (((earlier >= 0) & (earlier < later)) | (later == -1)).all(-1)


def read_topk(path: str | Path) -> SavedTopK:
    """Open a selection file.

    Raises:
        ValueError: the file is no selection file, or is damaged.
        OSError: the file cannot be read.
    """
    path = Path(path)
    header, topk, first = _read_header(path)
    places = dict(_read_entry(path, first, name, entry) for name, entry in header.items())
    layers, documents = (sorted({key[i] for key in places}) for i in (0, 1))
    tokens = tuple(places[layers[0], m].tokens for m in documents if (layers[0], m) in places)
    complete = documents == list(range(len(tokens))) and len(places) == len(layers) * len(tokens)
    if not places or not complete or any(place.tokens != tokens[m] for (_, m), place in places.items()):
        raise ValueError(
            f"{path} does not hold the same documents, counted from 0 and equally long, in each of its layers: write "
            "all of a pass into one file."
        )
    widest = max(place.width for place in places.values())
    return SavedTopK(path, tuple(layers), tokens, max(topk, widest), places)


def write_topk(
    path: Path, shapes: Mapping[tuple[int, int], tuple[int, int]], topk: int, rows: Iterable[Tensor]
) -> None:
    """Write a selection file, which appears whole or not at all.

    Args:
        path: the file; an existing one is replaced.
        shapes: of each (layer, document), in the order of ``rows``.
        topk: keys that a row selects at most.
        rows: int32 tensors of those shapes, ascending positions, then -1.
    """
    header: dict[str, Any] = {"__metadata__": {"topk": str(topk)}}
    end = 0
    for (layer, document), shape in shapes.items():
        start, end = end, end + prod(shape) * torch.int32.itemsize
        name = f"layer.{layer}.document.{document}"
        header[name] = {"dtype": "I32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for shape, tensor in zip(shapes.values(), rows, strict=True):
                assert tuple(tensor.shape) == shape and tensor.dtype == torch.int32
                file.write(tensor.contiguous().numpy().data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Entries of the tensors, the width that the metadata names (0 for none), and where the data begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        text = file.read(length) if length <= size - 8 else b""
    try:
        header = json.loads(text)
        topk = int(header.pop("__metadata__", {}).get("topk", 0))
        ends = [_end(*entry["data_offsets"]) for entry in header.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is no safetensors file: give a file that save_topk wrote.") from None
    end = max(ends, default=0)
    if 8 + length + end != size:
        raise ValueError(
            f"{path} has {size} bytes, but its header names {8 + length + end}: it was cut, write it again."
        )
    return header, topk, 8 + length


def _end(start: object, stop: object) -> int:
    if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop):
        raise ValueError("no span of bytes")
    return stop


def _read_entry(path: Path, first: int, name: str, entry: Mapping[str, Any]) -> tuple[tuple[int, int], _Place]:
    match, dtype, shape = _NAME.fullmatch(name), str(entry.get("dtype")), entry.get("shape")
    sizes = [size for size in shape if isinstance(size, int) and size > 0] if isinstance(shape, list) else []
    if match is None or dtype not in _DTYPES or len(sizes) != 2 or sizes != shape:
        raise ValueError(
            f"{path} holds {name!r} of type {dtype} and shape {shape}, but a selection file holds int32 tensors "
            "[tokens, K] named layer.N.document.M, none of them empty: write those alone."
        )
    start, stop = entry["data_offsets"]
    place = _Place(_DTYPES[dtype], sizes[0], sizes[1], first + start)
    if place.size != stop - start:
        raise ValueError(f"{path}: {name} has {stop - start} bytes for a shape of {place.size}: write the file again.")
    return (int(match[1]), int(match[2])), place
