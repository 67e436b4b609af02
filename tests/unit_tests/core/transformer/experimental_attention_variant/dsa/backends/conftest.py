"""Where the backend under test runs: on the emulator (CPU, in CI), or on the real kernels (mark ``gpu``)."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from . import emulator


@dataclass
class Stage:
    """A device, and the emulator if it stands in for the kernels there."""

    device: torch.device
    emulator: emulator.Emulator | None


@pytest.fixture(params=["emulator", pytest.param("kernels", marks=pytest.mark.gpu)])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if request.param == "kernels":
        yield Stage(torch.device("cuda", torch.cuda.current_device()), None)
        torch.cuda.empty_cache()
        return
    yield Stage(torch.device("cpu"), emulator.install(monkeypatch))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> emulator.Emulator:
    return emulator.install(monkeypatch)
