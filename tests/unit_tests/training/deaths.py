"""A process that dies in the middle of changing what is on disk."""

from __future__ import annotations

from typing import Any

import pytest


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def dies_at(monkeypatch: pytest.MonkeyPatch, target: tuple[Any, str], call: int, after: bool) -> list[int]:
    """Die at the ``call``-th call of ``target`` (module, function), before or after it; counts the calls."""
    module, name = target
    original, calls = getattr(module, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Died
        result = original(*args, **kwargs)
        if calls[0] == call:
            raise Died
        return result

    monkeypatch.setattr(module, name, dying)
    return calls
