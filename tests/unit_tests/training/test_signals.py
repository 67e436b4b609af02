"""A first signal is a request, a second Ctrl-C is not, and handlers come back."""

import os
import signal

import pytest

from megatron.training.signals import stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert request.received is None
        os.kill(os.getpid(), number)
        assert request.received == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.received == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
