"""Run a function on several Gloo processes, and get each one's result back.

Processes are forked from a server that has imported torch and the package once, so a world of four starts in a second.
One spawn should check many things: each file that needs ranks spawns once for each world size.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "megatron.core.models.gpt"]


def run_on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """Call ``function(*arguments)`` on ``world`` processes that share a Gloo process group; results in rank order.

    Raises:
        AssertionError: a process failed (the traceback of the first to fail) or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        started = (context.Process(target=_enter, args=(r, world, place, function, arguments)) for r in range(world))
        processes = list(started)
        for process in processes:
            process.start()
        try:
            _wait(processes, place, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(rank: int, world: int, place: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{place}/rendezvous", timeout=timedelta(seconds=120), rank=rank, world_size=world
        )
        torch.save(function(*arguments), place / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (place / f"{rank}.failed").write_text(f"{time.time()}\nrank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


def _wait(processes: list[Any], place: Path, deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline, "the ranks did not end in time"
        if any(process.exitcode for process in processes):
            time.sleep(0.5)  # the first to fail may not be the first seen
            break
        time.sleep(0.02)
    failures = sorted(path.read_text() for path in place.glob("*.failed"))
    assert not failures, failures[0].split("\n", 1)[1]
    assert not any(process.exitcode for process in processes), [process.exitcode for process in processes]
