"""Whole training runs for the tests: a model of two layers, as a command line, in this process or in one of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.training.metrics import read_metrics
from megatron.training.pretrain_gpt import main

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --swiglu --disable-bias-linear "
    "--q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --rope-type rope "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 6 "
    "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-layer-freq [0,1] --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
).split()
INDEXER_LOSS = "--dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss".split()
DATA = "--mock-data --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1".split()
TRAINING = "--lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 1 --log-interval 1".split()
TINY = [*MODEL, *INDEXER_LOSS, *DATA, *TRAINING]


def train(*arguments: str | Path, base: Sequence[str] = TINY) -> int:
    """Run in this process; returns the exit code."""
    return main([*base, *map(str, arguments)])


def spawn(*arguments: str | Path, base: Sequence[str] = TINY, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Run in a process of its own."""
    command = [sys.executable, *(launcher or ["-m", "megatron.training.pretrain_gpt"]), *base, *map(str, arguments)]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    environment.pop("WORLD_SIZE", None)
    return subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], log_dir: Path, step: int) -> None:
    """Return as soon as the process has logged ``step``."""
    while process.poll() is None:
        records = read_metrics(log_dir / "metrics.jsonl")
        if records and records[-1]["step"] >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run ended by itself: {process.communicate()[1]}")


def figures(log_dir: Path) -> list[dict[str, object]]:
    """The logged records, without what depends on the clock."""
    lines = (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"tokens_per_second", "tflops_per_gpu", "mfu", "seconds"}
    return [{key: value for key, value in json.loads(line).items() if key not in clock} for line in lines]
