"""Two processes under torchrun: when one fails all end within a minute, the cause on top, and a resume is exact."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from tests.functional_tests.runs import TINY, figures, spawn
from tests.functional_tests.test_resume import saved_tensors

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
FLAGS = "--device cpu --tensor-model-parallel-size 2 --sequence-parallel --train-iters 6 --save-interval 2"
RUN = [*TINY, *FLAGS.split()]
# Seconds from the failure until the last process has ended.
LIMIT = 60


def run(program: str, *flags: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a run by two processes, which end in time if one fails."""
    process = spawn(*flags, base=[], launcher=[*TORCHRUN.split(), "-m", *program.split(), *RUN])
    message = process.communicate(timeout=300)[1]
    failed = re.search(r"^failing at (\S+)$", message, re.MULTILINE)
    assert failed is None or time.time() - float(failed[1]) < LIMIT, message
    return process.returncode, message


def assert_on_top(cause: str, message: str) -> None:
    """The cause is said, and before whatever follows from it."""
    assert "failing at" in message and cause in message, message
    consequences = [message.find(sign) for sign in ("rank 0: ", "Connection closed", "ChildFailedError")]
    assert all(message.index(cause) < place for place in consequences if place >= 0), message


def test_a_run_whose_rank_was_killed_resumes_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, message = run("megatron.training.pretrain_gpt", "--save", whole, "--save-retain-interval", "4")
    assert code == 0 and "cannot be deleted" not in message, message
    assert sorted(path.name for path in whole.glob("*iter_*")) == ["iter_0000004", "iter_0000006"]
    code, message = run("tests.functional_tests.failing_run dies 4", "--save", broken)
    assert code != 0, message
    # A killed process says nothing; torchrun does, and names it as the root cause below.
    assert_on_top("(exitcode: -9) local_rank: 1", message)
    assert re.search(r"Root Cause.*\brank\s*:\s*1\b.*SIGKILL", message, re.DOTALL), message
    assert len(figures(broken)) == 3
    code, message = run("megatron.training.pretrain_gpt", "--save", broken, "--load", broken)
    assert code == 0 and "after step 2" in message, message
    assert figures(broken) == figures(whole)
    expected, found = saved_tensors(whole / "iter_0000006"), saved_tensors(broken / "iter_0000006")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


FAILURES = [
    ("raises", "rank 1: RuntimeError: the lamp went out"),
    ("cannot-read", "rank 1: The data of step 4 cannot be read (the disk went away): training stops; the last good"),
]


@pytest.mark.parametrize(("how", "cause"), FAILURES)
def test_the_first_cause_stands_on_top(tmp_path: Path, how: str, cause: str) -> None:
    code, message = run(f"tests.functional_tests.failing_run {how} 4", "--save", tmp_path)
    assert code != 0, message
    assert_on_top(cause, message)
    # An error ends all at once; data that one rank cannot read let everyone save the step before.
    assert (tmp_path / f"iter_000000{3 if how == 'cannot-read' else 2}/.metadata").exists()
    assert message.count("training stops") == (how == "cannot-read")


def test_ranks_stop_together_when_one_is_asked(tmp_path: Path) -> None:
    code, message = run("tests.functional_tests.failing_run asked 3", "--save", tmp_path)
    assert code == 0, message
    assert message.count("Stopped after step 3 because of SIGTERM (saved") == 1
    assert (tmp_path / "iter_0000003/.metadata").exists() and len(figures(tmp_path)) == 3


def test_ranks_leave_an_evaluation_together(tmp_path: Path) -> None:
    flags = ["--eval-interval", "3", "--eval-iters", "10", "--save", tmp_path]
    code, message = run("tests.functional_tests.failing_run asked-in-evaluation 0", *flags)
    assert code == 0, message
    assert message.count("Stopped after step 3 because of SIGTERM (saved") == 1
    assert (tmp_path / "iter_0000003/.metadata").exists() and "valid_lm_loss" not in figures(tmp_path)[-1]


def test_a_file_that_changed_is_named_by_the_rank_that_checks_it(tmp_path: Path) -> None:
    code, message = run("megatron.training.pretrain_gpt", "--save", tmp_path, "--exit-interval", "2")
    assert code == 0, message
    path = tmp_path / "iter_0000002/__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    code, message = run("megatron.training.pretrain_gpt", "--save", tmp_path, "--load", tmp_path)
    assert code != 0
    assert "iter_0000002 is damaged (__1_0.distcp does not hold the bytes that were saved): resume from" in message
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    code, message = run("megatron.training.pretrain_gpt", "--save", tmp_path, "--load", tmp_path)
    assert code == 0, message
    assert json.loads((tmp_path / "iter_0000006/checksums.json").read_text())["files"].keys() == {
        ".metadata", "run.json", "__0_0.distcp", "__1_0.distcp"
    }  # fmt: skip


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    flags = ["--load", tmp_path, "--exit-on-missing-checkpoint", "--save", tmp_path / "new/run"]
    code, message = run("megatron.training.pretrain_gpt", *flags, "--log-dir", tmp_path / "log")
    assert code != 0 and f"--load {tmp_path} holds no checkpoint" in message, message
    assert list(tmp_path.iterdir()) == []
