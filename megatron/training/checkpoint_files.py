"""The bytes of a checkpoint: checksums taken when it is saved, and compared when it is loaded.

``checksums.json`` holds the CRC-32 of every file that a load needs. Each process takes those of the files that it
wrote, after they are on the disk. A load checks every file once: of several processes each takes those of the writer
with its own number, which on an unchanged layout are the ones that it reads most of. A checkpoint without
``checksums.json`` is loaded unchecked. ``config.json`` has no checksum: a load does not depend on it, and people edit
it.

What goes wrong below torch.distributed.checkpoint arrives as a stack of other errors; here it gets its own words back.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from megatron.training.ranks import rank, world_size

CHECKSUMS = "checksums.json"
_BLOCK = 2**20
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
        """Check this rank's share of the files; all ranks have done so before any of them reads tensors."""
        require_saved_bytes(self._folder, [name for name in _saved(self._folder) if _is_own(name)])
        return super().prepare_local_plan(plan)


def own_checksums(folder: Path) -> dict[str, str] | OSError:
    """Checksums of the tensor files that this rank wrote; an error is for another rank to raise."""
    try:
        return {path.name: _checksum(path) for path in folder.glob(f"__{rank()}_*")}
    except OSError as error:
        return error


def all_checksums(folder: Path, of_ranks: Iterable[dict[str, str] | OSError]) -> dict[str, str]:
    """What ``checksums.json`` is to hold.

    Raises:
        OSError: a rank could not read back what it wrote.
    """
    sums = {name: _checksum(folder / name) for name in (".metadata", "run.json")}
    for part in of_ranks:
        if isinstance(part, OSError):
            raise part
        sums |= part
    return sums


def require_saved_bytes(folder: Path, names: Iterable[str]) -> None:
    """Check files of a checkpoint.

    Raises:
        ValueError: a file does not hold what was saved, or the checksums cannot be read.
        OSError: a file cannot be read.
    """
    saved = _saved(folder)
    for name in names:
        if name in saved and _checksum(folder / name) != saved[name]:
            raise ValueError(f"{name} does not hold the bytes that were saved")


def _saved(folder: Path) -> dict[str, str]:
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(checksum) for name, checksum in saved.items()}
    except (ValueError, AttributeError):
        raise ValueError(f"{CHECKSUMS} is not what was saved") from None


def _is_own(name: str) -> bool:
    writer = name.removeprefix("__").partition("_")[0]
    return name.startswith("__") and writer.isdigit() and int(writer) % world_size() == rank()


def _checksum(path: Path) -> str:
    total, buffer = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            total = zlib.crc32(buffer[:length], total)
    return f"{total:08x}"
