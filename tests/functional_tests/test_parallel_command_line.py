"""The command line under torchrun: one run over two ranks of three kinds, each going on where the one before stopped.

Training, evaluation, metrics and checkpoints must be those of one process that ran through: the same samples in the
same order, and figures that differ by the order of sums alone (scored in FP32).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpointing import LATEST
from tests.functional_tests.runs import TINY, figures, spawn, train

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron.training.pretrain_gpt".split()
SIZES = {
    "data parallel": "",
    "context parallel": "--context-parallel-size 2 --cp-comm-type allgather",
    "expert parallel": "--expert-model-parallel-size 2",
}
STEPS_EACH = 2
RUN = [
    *TINY,
    *f"--device cpu --train-iters {STEPS_EACH * len(SIZES)} --eval-interval 1 --dsa-log-mass-interval 2".split(),
    *"--dsa-indexer-scoring-precision fp32 --init-method-std 0.2".split(),
]
# Adam divides by small second moments, so the order of sums shows more from step to step.
TOLERANCE = 1e-4


def assert_same_figures(got: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_same_figures(got[name], value, f"{where}: {name}")
        elif isinstance(value, float):
            assert math.isfinite(value) and got[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-7), (
                f"{where}: {name}"
            )
        else:
            assert got[name] == value, f"{where}: {name}"


def test_two_ranks_of_any_kind_go_on_as_one_process(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert train("--save", alone, base=RUN) == 0
    wanted = figures(alone)
    assert [record["consumed_samples"] for record in wanted] == [4 * step for step in range(1, len(wanted) + 1)]
    for number, (kind, flags) in enumerate(SIZES.items(), 1):
        last = number * STEPS_EACH
        stop = ["--exit-interval", str(last)]
        process = spawn(*RUN, *flags.split(), *stop, "--save", together, "--load", together, base=[], launcher=TORCHRUN)
        message = process.communicate(timeout=200)[1]
        assert process.returncode == 0, message
        assert (f"after step {last - STEPS_EACH}." in message) == (number > 1), message
        assert "Options differ" not in message
        assert (together / LATEST).read_text() == str(last)
        got = figures(together)
        assert len(got) == last
        for step, record in enumerate(got, 1):
            assert_same_figures(record, wanted[step - 1], f"{kind}, step {step}")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (together, alone)]
    assert_same_figures(*(summary["held_out"] for summary in summaries), "held out")
