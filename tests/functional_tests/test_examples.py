"""The example that ``make train`` runs, cut short."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tiny_example_leaves_what_it_promises(tmp_path: Path) -> None:
    flags = "--train-iters 3 --seq-length 64 --micro-batch-size 2 --lr-warmup-iters 1 --eval-iters 1 --log-interval 1"
    environment = os.environ | {"PYTHON": sys.executable, "RUNS_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "examples/tiny_glm5/train.sh"), *flags.split()]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (run,) = tmp_path.glob("tiny_glm5-*")
    for name in (
        "metrics.jsonl",
        "loss_curve.png",
        "summary.json",
        "iter_0000003",
        "tensorboard",
        "attention_mass.png",
    ):
        assert (run / name).exists(), name
        assert name == "attention_mass.png" or str(run / name) in result.stderr
    assert "With a trained indexer, the selection holds" in result.stdout
    assert "With a frozen indexer, the selection holds" in result.stdout
    trained, frozen = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (run, run / "frozen_indexer")
    )
    assert trained["indexer_loss"] > 0 and frozen["indexer_loss"] is None
    assert frozen["dsa_attention_mass"] > 0
