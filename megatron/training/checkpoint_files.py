"""The bytes of a checkpoint: checksums taken when it is saved, and compared when it is loaded.

``checksums.json`` holds the CRC-32 of every block of every file that a load needs. Each process takes those of the
files that it wrote, after they are on the disk. A load checks every block of the tensors once: of several processes
each takes an even run of them in the order of the writers, however few these were. So nobody waits long for another,
and on an unchanged layout each checks what it reads most of. A checkpoint without ``checksums.json`` is loaded
unchecked. ``config.json`` has no checksum: a load does not depend on it, and people edit it.

What goes wrong below torch.distributed.checkpoint arrives as a stack of other errors; here it gets its own words back.
"""

from __future__ import annotations

import errno
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from megatron.training.ranks import rank, world_size

CHECKSUMS = "checksums.json"
_BLOCK_BYTES = 2**28
_READ_BYTES = 2**20
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def reason(error: BaseException | None) -> str:
    """The first sentence of what went wrong; a full disk is called that, whatever it broke."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    first, cause = error, error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _FULL[cause.errno]
        cause = cause.__cause__ or cause.__context__
    return str(first).split(". ")[0].split("\n")[0].strip() or type(first).__name__


class ChangedError(ValueError):
    """A file does not hold the bytes that were saved."""


class _Checksums(NamedTuple):
    """Of each file those of its blocks; the last block, which may be empty, ends with the file."""

    block_bytes: int
    files: dict[str, list[str]]


class Writer(dcp.FileSystemWriter):
    """Writes to the disk, and keeps the reason of a failure, which does not travel to other ranks, in its words."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise OSError(reason(error)) from error


class Reader(dcp.FileSystemReader):
    """Reads files whose bytes are those that were saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check this rank's share of the blocks; all ranks have done so before any of them reads tensors."""
        saved = _saved(self._folder)
        for name, index in _own_blocks(saved.files):
            _require_saved_block(self._folder / name, index, saved)
        return super().prepare_local_plan(plan)


def own_checksums(folder: Path) -> dict[str, list[str]] | OSError:
    """Checksums of the tensor files that this rank wrote; an error is for another rank to raise."""
    try:
        return {path.name: _checksums(path) for path in folder.glob(f"__{rank()}_*")}
    except OSError as error:
        return error


def all_checksums(folder: Path, of_ranks: Iterable[dict[str, list[str]] | OSError]) -> dict[str, object]:
    """What ``checksums.json`` is to hold.

    Raises:
        OSError: a rank could not read back what it wrote.
    """
    files = {name: _checksums(folder / name) for name in (".metadata", "run.json")}
    for part in of_ranks:
        if isinstance(part, OSError):
            raise part
        files |= part
    return _Checksums(_BLOCK_BYTES, files)._asdict()


def require_saved_bytes(folder: Path, names: Iterable[str]) -> None:
    """Check files of a checkpoint.

    Raises:
        ChangedError: a file does not hold what was saved.
        ValueError: the checksums cannot be read.
        OSError: a file cannot be read.
    """
    saved = _saved(folder)
    for name in names:
        for index in range(len(saved.files.get(name, ()))):
            _require_saved_block(folder / name, index, saved)


def _own_blocks(files: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    """The run of tensor blocks that this rank checks: as many as every other rank, give or take one."""
    names = sorted((name for name in files if name.startswith("__")), key=lambda name: (len(name), name))
    blocks = [(name, index) for name in names for index in range(len(files[name]))]
    first, end = (len(blocks) * number // world_size() for number in (rank(), rank() + 1))
    yield from blocks[first:end]


def _require_saved_block(path: Path, index: int, saved: _Checksums) -> None:
    expected = saved.files[path.name]
    if _checksum(path, index, saved.block_bytes, len(expected)) != expected[index]:
        raise ChangedError(f"{path.name} does not hold the bytes that were saved")


def _saved(folder: Path) -> _Checksums:
    path = folder / CHECKSUMS
    if not path.exists():
        return _Checksums(_BLOCK_BYTES, {})
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): [str(checksum) for checksum in blocks] for name, blocks in saved["files"].items()}
        return _Checksums(int(saved["block_bytes"]), files)
    except (ValueError, AttributeError, LookupError, TypeError):
        raise ValueError(f"{CHECKSUMS} is not what was saved") from None


def _checksums(path: Path) -> list[str]:
    count = path.stat().st_size // _BLOCK_BYTES + 1
    return [_checksum(path, index, _BLOCK_BYTES, count) for index in range(count)]


def _checksum(path: Path, index: int, block_bytes: int, count: int) -> str:
    """Of block ``index`` among ``count``; the last one takes whatever follows, so that no byte is left out."""
    start, total, buffer = index * block_bytes, 0, memoryview(bytearray(_READ_BYTES))
    left = block_bytes if index + 1 < count else sys.maxsize
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length := file.readinto(buffer[:left]):
            total, left = zlib.crc32(buffer[:length], total), left - length
    return f"{total:08x}"
