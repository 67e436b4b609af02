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


def test_a_lost_connection_is_one_late_line_and_a_cause_is_told_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    ranks.report_crash(RuntimeError("[gloo/transport] Connection closed by peer\n[::1]:1"))
    assert (
        capsys.readouterr().err == "rank 0: lost another rank ([gloo/transport] Connection closed by peer [::1]:1).\n"
    )
    assert waits == [ranks._PATIENCE]
    ranks.report_crash(RuntimeError("the lamp went out"))
    error = capsys.readouterr().err
    assert error.startswith("rank 0: RuntimeError: the lamp went out\n") and len(waits) == 1


def test_only_later_ranks_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    for world, own in (("1", "0"), ("4", "0"), ("4", "2")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", own)
        ranks.wait_for_the_first()
    assert waits == [ranks._PATIENCE]
