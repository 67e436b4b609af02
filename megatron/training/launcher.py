"""What the launcher of several processes (torchrun) tells each of them by environment variables, read here alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PORTS = 2**16


@dataclass(frozen=True)
class Launch:
    """One process among those that were started.

    Attributes:
        world_size: processes of the run.
        rank: this one's number among them.
        local_world_size: processes on this machine.
        local_rank: this one's number among these.
        joins: whether there is a group to join, of one process or more.
    """

    world_size: int
    rank: int
    local_world_size: int
    local_rank: int
    joins: bool


def read_launch() -> Launch:
    """This process, which is the only one where nothing says otherwise.

    Raises:
        ValueError: one sentence about a variable that makes no sense.
    """
    world, rank = _number("WORLD_SIZE", 1, least=1), _number("RANK", 0)
    if rank >= world:
        raise ValueError(
            f"RANK is {rank} in the environment, but the {world} processes that WORLD_SIZE counts have ranks 0 to "
            f"{world - 1}: start the processes with torchrun, or unset both."
        )
    joins = {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    if world > 1 and not joins:
        raise ValueError(
            f"WORLD_SIZE is {world}, but RANK and MASTER_ADDR are not set: start the processes with torchrun, or unset "
            "WORLD_SIZE."
        )
    missing = [name for name in ("WORLD_SIZE", "MASTER_PORT") if name not in os.environ]
    if joins and missing:
        raise ValueError(
            f"RANK and MASTER_ADDR are set in the environment, but {missing[0]} is not: start the processes with "
            f"torchrun, or set {missing[0]}."
        )
    if joins and not 0 < (port := _number("MASTER_PORT", 1)) < _PORTS:
        raise ValueError(
            f"MASTER_PORT is {port} in the environment, but ports are 1 to {_PORTS - 1}: start the processes with "
            "torchrun, or name a free port."
        )
    return Launch(world, rank, _number("LOCAL_WORLD_SIZE", 1, least=1), _number("LOCAL_RANK", 0), joins)


def is_alone() -> bool:
    """Whether this is the only process of the run; False where the environment makes no sense."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Whether this is rank 0, before its group exists."""
    return os.environ.get("RANK", "0") == "0"


def _number(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ValueError(
            f"{name} is {text!r} in the environment, which is no whole number of at least {least}: start the processes "
            f"with torchrun, or unset {name}."
        )
    return int(text)
