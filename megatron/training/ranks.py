"""What the processes of one run settle among themselves: who writes, when to stop, what to say when one fails.

A process that fails ends at once and does not wait for the others in a shutdown handshake: the launcher sees it, and
stops the rest. Those notice a broken connection sooner; they hold their tongue for a moment, so that the first cause
stands on top of the log, and then say in one line that they lost another rank. An error of a communication library that
may have another cause waits as long and is then told in full.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.shards import local_part
from megatron.training.launcher import is_alone, is_first

# Seconds that a rank which lost another one leaves to the first cause; launchers wait longer before they kill.
_PATIENCE = 3.0
_SHOWN = 3
# What Gloo, NCCL and the rendezvous say when the other side is gone, and what else they say speaks of them.
_LOST = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
)
_COMMUNICATION = ("gloo", "nccl", "timed out waiting", "socket")

T = TypeVar("T")


def world_size() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if world_size() > 1 else 0


def on_first_rank(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the others wait; an ``OSError`` there is raised on all of them."""
    if world_size() == 1:
        action()
        return
    failure: list[str | None] = [None]
    if rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(failure[0])


def largest(code: int, groups: ProcessGroupCollection, device: torch.device) -> int:
    """The largest ``code`` that any rank gives."""
    if groups.world is None:
        return code
    message = torch.full((), code, device=device)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=groups.world)
    return int(message)


def first_said(sentence: str | None) -> str:
    """What the first rank that has something to say says, under its number if it is one of several; all call this."""
    said = gathered(sentence)
    number = next(number for number, text in enumerate(said) if text)
    return f"rank {number}: {said[number]}" if len(said) > 1 else f"{said[0]}"


def gathered(value: T) -> list[T]:
    """What each rank has, on all of them."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal_replicas(tensors: Mapping[str, Tensor], groups: ProcessGroupCollection) -> None:
    """Refuse state that is meant to be the same on several ranks and is not; every bit counts.

    Plain tensors are meant to be the same on all ranks, and shards of parameters that tensor parallelism does not
    split on all tensor-parallel ranks.

    Raises:
        ValueError: names the first that differ.
    """
    if groups.world is None:
        return
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    copied = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor) and _is_copied(tensor, groups)]
    different = _different(plain, tensors, groups.world)
    different += [] if groups.tp is None else _different(copied, tensors, groups.tp)
    if largest(len(different), groups, torch.device(groups.mesh.device_type if groups.mesh else "cpu")):
        listed = ", ".join(different[:_SHOWN]) or "seen by other ranks"
        raise ValueError(
            f"{len(different)} tensors that every rank should hold alike differ between ranks ({listed}), so a "
            "checkpoint could keep one of them only: this is a fault of the program, please report it."
        )


def _is_copied(tensor: DTensor, groups: ProcessGroupCollection) -> bool:
    assert groups.world is not None
    return tensor.device_mesh.size() < groups.world.size()


def _different(names: list[str], tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    if not names:
        return []
    device = next((local_part(tensors[n]).device for n in names if tensors[n].is_cuda), torch.device("cpu"))
    own = torch.stack([_fingerprint(local_part(tensors[name])).to(device) for name in names])
    message = torch.stack((own, -own))
    if dist.get_backend(group) == "nccl":
        message = message.cuda()
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    unequal = (message[0] != -message[1]).tolist()
    return [name for name, differs in zip(names, unequal, strict=True) if differs]


def _fingerprint(tensor: Tensor) -> Tensor:
    """63 bits that depend on every bit and its place; the sign stays free, so that it can be negated."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    odd = torch.arange(len(words), device=words.device) * 2 + 1
    total = (words * odd).sum()
    # Mixed before a bit is dropped (the constant is SplitMix64's): neighbouring sums must not meet.
    total = (total ^ (total >> 33)) * -0x40A7B892E31B1A47
    return (total ^ (total >> 29)) >> 1


def flat_tensors(state: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, Tensor]]:
    """The tensors of a nested state under dotted names."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from flat_tensors(value, f"{prefix}{name}.")


def wait_for_the_first() -> None:
    """Give rank 0 the time to say what is most likely wrong on all ranks; the launcher then ends the others unheard."""
    if not is_alone() and not is_first():
        time.sleep(_PATIENCE)


def leave(code: int) -> int:
    """End a process of several that failed; returns ``code`` where it runs alone or nothing failed."""
    if code == 0 or world_size() == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_crash(error: BaseException) -> None:
    """Say on stderr what ended this rank of several: in one line if it lost another one, else in full.

    What may follow from another rank's failure is said late.
    """
    text = " ".join(str(error).split())

    def speaks_of(signs: tuple[str, ...]) -> bool:
        return isinstance(error, RuntimeError) and any(sign in text.lower() for sign in signs)

    lost = speaks_of(_LOST)
    if lost or speaks_of(_COMMUNICATION):
        time.sleep(_PATIENCE)
    if lost:
        print(f"rank {rank()}: lost another rank ({text[:200]}).", file=sys.stderr, flush=True)
        return
    trace = "".join(traceback.format_exception(error))
    print(f"rank {rank()}: {type(error).__name__}: {text}\n{trace}", file=sys.stderr, flush=True)
