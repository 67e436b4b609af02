"""Writing a checkpoint folder: sharded safetensors, one tensor in memory at a time, all or nothing.

Sizes are known beforehand, so a shard's header is written first and its tensors follow one by one (the library's own
writer wants a whole shard in memory). The folder is built under a temporary name beside its goal and renamed at the
end: an export that dies leaves no half-written checkpoint behind.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.models.hf.tensor_folder import INDEX_NAME, SINGLE_NAME

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its name, data type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def require_free(folder: Path) -> None:
    """Check that a folder can be written.

    Raises:
        ValueError: something is at ``folder`` already (an empty folder may be).
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: remove it, or write to another one.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the name ``folder`` when the block ends well, and is removed when it does not.

    Raises:
        ValueError: something is at ``folder`` already (an empty folder may be).
    """
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield building
        building.chmod(0o755)
        os.replace(building, folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def plan_shards(entries: Iterable[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    """Entries in order, cut into shards of at most ``max_shard_bytes`` (a larger tensor gets a shard of its own)."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def write_tensors(
    folder: Path, entries: Sequence[Entry], fetch: Callable[[str], torch.Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors into ``folder`` as one file, or as shards with an index.

    Args:
        entries: what to write, in this order.
        fetch: gives the tensor of a name; called once a name, and its result is dropped before the next call.
    """
    shards = plan_shards(entries, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file_name, shard, fetch)
        weight_map |= {entry.name: file_name for entry in shard}
    if len(shards) > 1:
        total = sum(entry.num_bytes for entry in entries)
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, and wait until it is on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_shard(path: Path, shard: Sequence[Entry], fetch: Callable[[str], torch.Tensor]) -> None:
    # Wide types first: every tensor then starts at a multiple of its item size.
    shard = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in shard:
        span = [offset, offset + entry.num_bytes]
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for entry in shard:
            tensor = fetch(entry.name).detach().to("cpu", entry.dtype)
            assert tuple(tensor.shape) == entry.shape, f"{entry.name}: {tuple(tensor.shape)} is not {entry.shape}"
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor
        file.flush()
        os.fsync(file.fileno())
