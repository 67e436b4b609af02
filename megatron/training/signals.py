"""SIGTERM and Ctrl-C ask the run to save and stop after the step, or the batch of an evaluation, that it is in.

A second Ctrl-C stops it at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether, and by what, the run was asked to stop."""

    def __init__(self) -> None:
        self.received: str | None = None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect stop signals instead of dying from them."""
    request = StopRequest()
    previous = {number: signal.signal(number, request._take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
