"""Device time by events: warmed up, repeated, the median; and peak memory beyond what already lives."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

GIB = 2**30
SLOW_MS = 1000.0


def milliseconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Median device time of ``function`` after warm-up; its results are dropped before the next run."""
    function()  # kernels compile
    first = _once(function)
    if first > SLOW_MS:
        return median([first, _once(function)])
    return median(_once(function) for _ in range(repeats))


def _once(function: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def peak_gib(function: Callable[[], object]) -> tuple[float, float, object]:
    """Peak GiB while ``function`` runs, beyond what was allocated before; what its result keeps alive; the result."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB, (torch.cuda.memory_allocated() - before) / GIB, result
