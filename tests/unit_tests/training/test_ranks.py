"""What ranks settle among themselves, as far as one process can show it; over ranks: tests/functional_tests."""

from __future__ import annotations

import pytest
import torch

from megatron.core.process_groups import ProcessGroupCollection
from megatron.training import ranks


def test_one_process_needs_nobody() -> None:
    done: list[int] = []
    ranks.on_first_rank(lambda: done.append(1))
    assert done == [1] and (ranks.rank(), ranks.world_size()) == (0, 1)
    assert ranks.largest(3, ProcessGroupCollection(), torch.device("cpu")) == 3
    ranks.require_equal_replicas({"x": torch.ones(2)}, ProcessGroupCollection())
    assert [ranks.leave(code) for code in (0, 1, 2)] == [0, 1, 2]


def test_an_error_on_the_first_rank_is_the_error_of_one_process() -> None:
    def fails() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        ranks.on_first_rank(fails)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_fingerprint_sees_every_bit_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 12).to(dtype)
    seen = {int(ranks._fingerprint(values))}
    for place in range(len(values)):
        changed = values.clone()
        changed.view(torch.uint8)[place * values.element_size()] ^= 1
        seen.add(int(ranks._fingerprint(changed)))
    seen.add(int(ranks._fingerprint(values.flip(0))))
    assert len(seen) == len(values) + 2
    assert int(ranks._fingerprint(values.clone())) in seen
    assert int(ranks._fingerprint(torch.zeros(0, dtype=dtype))) == 0


def test_tensors_of_a_nested_state_are_named() -> None:
    state = {"a": torch.ones(1), "b": {"c": torch.ones(2), "d": 3.0}}
    assert [name for name, _ in ranks.flat_tensors(state)] == ["a", "b.c"]


LOST = [
    "[gloo/transport] Connection closed by peer\n[::1]:1",
    "NCCL error, remote process exited\nLast error:\nsocketProgress: Connection closed by remote peer host<1>",
    "recvValue failed on SocketImpl(fd=4): Connection reset by peer",
    "failed to recv, got 0 bytes. Connection was likely closed.",
    "[gloo/transport] writev: Broken pipe",
]
UNSURE = [
    "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nLast error:\nCuda failure 'out of memory'",
    "[gloo/transport] Timed out waiting 1000ms for recv operation to complete",
    "No backend type associated with device type cpu: gloo is not initialized",
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a rank would have slept."""
    waits: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    return waits


def caught(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.mark.parametrize("text", LOST)
def test_a_lost_connection_is_one_late_line(text: str, waits: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    ranks.report_crash(caught(RuntimeError(text)))
    assert capsys.readouterr().err == f"rank 0: lost another rank ({' '.join(text.split())}).\n"
    assert waits == [ranks._PATIENCE]


@pytest.mark.parametrize("text", UNSURE)
def test_another_error_of_a_communication_library_is_told_late_and_in_full(
    text: str, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.report_crash(caught(RuntimeError(text)))
    line, *trace = capsys.readouterr().err.splitlines()
    assert line == f"rank 0: RuntimeError: {' '.join(text.split())}" and waits == [ranks._PATIENCE]
    assert trace[0].startswith("Traceback") and "in caught" in trace[1]


@pytest.mark.parametrize("error", [RuntimeError("the lamp went out"), ValueError("broken pipe of gloo")])
def test_any_other_error_is_told_at_once(
    error: Exception, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.report_crash(caught(error))
    line, *trace = capsys.readouterr().err.splitlines()
    assert line == f"rank 0: {type(error).__name__}: {error}" and trace[0].startswith("Traceback") and waits == []


def test_only_later_ranks_wait_for_the_first(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    for world, own in (("1", "0"), ("4", "0"), ("4", "2")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", own)
        ranks.wait_for_the_first()
    assert waits == [ranks._PATIENCE]
