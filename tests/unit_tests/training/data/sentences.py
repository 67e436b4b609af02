"""Errors are one sentence: a helper that every error test of the data goes through."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_sentence(*pieces: str) -> Iterator[None]:
    """Expect a ValueError of one line and one full stop at its end, holding all `pieces`."""
    with pytest.raises(ValueError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")) and ". " not in message, message
    for piece in pieces:
        assert piece in message, message
