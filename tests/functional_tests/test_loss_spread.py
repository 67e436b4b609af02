"""How far whole runs of one command drift apart where nothing asks for determinism; ``-rP`` shows the figures.

Kernels that add up in any order make two runs differ; what is measured here is what a tolerance on losses has to allow.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.functional_tests.runs import TINY, figures, train

RUNS, STEPS = 5, 5
KERNELS = (
    "--device cuda --dsa-kernel-backend cudnn --bf16 --num-attention-heads 16 --kv-lora-rank 512 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 64 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 64 "
    "--seq-length 256"
).split()
# Flags, and the largest relative spread of the LM loss. One process with one thread on a CPU repeats itself.
SETTINGS = [
    pytest.param(["--device", "cpu"], 0.0, id="reference"),
    pytest.param(KERNELS, 0.02, id="cudnn", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("flags", "largest"), SETTINGS)
def test_the_spread_of_five_runs(flags: list[str], largest: float, tmp_path: Path) -> None:
    runs = []
    for number in range(RUNS):
        place = tmp_path / str(number)
        options = ["--train-iters", str(STEPS), "--eval-iters", "0", "--log-dir", place]
        assert train(*flags, *options, base=TINY) == 0
        runs.append(figures(place))
    spreads = {}
    for name in ("lm_loss", "indexer_loss"):
        for step, values in enumerate(zip(*([record[name] for record in run] for run in runs), strict=True), 1):
            mean = statistics.mean(values)
            spreads[name, step] = (max(values) - min(values)) / mean
            print(f"{name} of step {step}: mean {mean:.6g}, relative spread {spreads[name, step]:.2e}")
    assert max(spreads["lm_loss", step] for step in range(1, STEPS + 1)) <= largest
