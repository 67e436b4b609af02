"""Two ranks that share a model train twice to the same weights, optimizer state and figures, bit for bit.

One spawn of two Gloo processes runs every kind of parallelism twice. What is compared is each rank's own shards.
"""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.prepare import make_deterministic
from tests.functional_tests.runs import INDEXER_LOSS, figures
from tests.ranks import run_on_ranks

from .kernels.manifest import RUNTIME_OPERATORS, RUNTIME_OPERATORS_OF_RANKS
from .kernels.operators import Operators, join_as_torchrun_does
from .test_training_twice import train, unequal

TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
MODES = {
    "data": [],
    "context": ["--context-parallel-size", "2", "--cp-comm-type", "allgather"],
    "tensor": TENSOR,
    "expert": ["--expert-model-parallel-size", "2"],
    "tensor and expert": [*TENSOR, "--expert-model-parallel-size", "2"],
}


def run(options: list[str]) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
    """This rank's weights and optimizer state after some steps, and the figures that the first one logged."""
    with tempfile.TemporaryDirectory() as folder:
        places: list[str] = [folder]
        dist.broadcast_object_list(places, src=0)
        tensors = train(Path(places[0]) / "run", "cpu", [*INDEXER_LOSS, *options])
        dist.barrier()
        logged = figures(Path(places[0]) / "run")
        dist.barrier()  # a folder goes when all have read it
    return tensors, logged


class Twice(NamedTuple):
    """Two runs of one rank: which of the tensors differ, whether the figures agree, and what operators ran."""

    different: list[str]
    compared: int
    equal_figures: bool
    operators: set[str]


def both_runs() -> dict[str, Twice]:
    """Each mode twice, and two seeds."""
    join_as_torchrun_does()
    results = {}
    for name, options in [*MODES.items(), ("another seed", [])]:
        with Operators() as operators:
            first, first_figures = run(options)
        second, second_figures = run(options if name in MODES else ["--seed", "4321"])
        equal_figures = first_figures == second_figures and len(first_figures) >= 3
        results[name] = Twice(unequal(first, second), len(first), equal_figures, operators.accumulating)
    return results


@cache
def ranks() -> list[dict[str, Twice]]:
    return run_on_ranks(2, both_runs)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_over_two_ranks_are_equal(mode: str) -> None:
    for results in ranks():
        assert results[mode].different == [] and results[mode].compared > 60 and results[mode].equal_figures


def test_another_seed_is_noticed() -> None:
    assert all(len(results["another seed"].different) > 10 for results in ranks())


def test_the_accumulating_operators_over_ranks_are_known() -> None:
    ran = set.union(*(twice.operators for results in ranks() for twice in results.values()))
    assert ran - set(RUNTIME_OPERATORS) == set(RUNTIME_OPERATORS_OF_RANKS)
    assert all("scatter_add" in results[mode].operators for results in ranks() for mode in ("tensor", "expert"))


# ---- what the libraries read from the environment ----

WORKSPACE, ALGORITHM = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
CUDA = torch.device("cuda")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    for name in (WORKSPACE, ALGORITHM):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_unset_variables_are_set(environment: pytest.MonkeyPatch) -> None:
    make_deterministic(torch.device("cpu"), 2)
    assert WORKSPACE not in os.environ and ALGORITHM not in os.environ
    make_deterministic(CUDA, 1)
    assert os.environ[WORKSPACE] == ":4096:8" and ALGORITHM not in os.environ
    make_deterministic(CUDA, 2)
    assert os.environ[ALGORITHM] == "Ring"


@pytest.mark.parametrize(
    ("name", "value"),
    [(WORKSPACE, ":16:8"), (WORKSPACE, ":4096:8"), (ALGORITHM, "ring"), (ALGORITHM, "Tree"), (ALGORITHM, "Ring,Tree")],
)
def test_variables_that_repeat_are_kept(name: str, value: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(name, value)
    make_deterministic(CUDA, 2)
    assert os.environ[name] == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (WORKSPACE, ":0:0"),
        (WORKSPACE, ":4096:2:16:8"),
        (ALGORITHM, "NVLS"),
        (ALGORITHM, "^NVLS"),
        (ALGORITHM, "Ring,CollnetDirect"),
        (ALGORITHM, ""),
    ],
)
def test_other_variables_are_refused(name: str, value: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(name, value)
    with pytest.raises(ValueError, match=f"deterministic_mode=True needs {name} to be .*, but the environment has"):
        make_deterministic(CUDA, 2)


def test_one_process_asks_nothing_of_nccl(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(ALGORITHM, "NVLS")
    make_deterministic(CUDA, 1)
