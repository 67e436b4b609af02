"""Train a GLM-5-style model with kernel-sized heads on one Hopper GPU, on the kernels and on the reference.

    python -m tests.performance_tests.dsa.end_to_end --out DIR [--steps 200] [--only kernels|precision]

"kernels": loss off, sparse and dense, each with ``--dsa-kernel-backend cudnn`` and ``none``, same seed, BF16 scoring in
both: the mean language-model loss of the last 50 steps must agree. The kernels with the loss off run twice, which shows
how far apart runs end up whose kernels add in any order. "precision": the four settings of
``dsa_indexer_rope_fp32`` and ``dsa_indexer_scoring_precision`` on the kernels, loss off, and how much of what they
select with equal (trained) weights is the same.

The runs go side by side, shared out over the visible GPUs, so their step times are no benchmark. Markdown on stdout;
exit code 1 if a run failed, a loss is not finite, or a pair differs by more than ``LOSS_TOLERANCE``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import record_topk
from megatron.core.transformer.experimental_attention_variant.dsa.reference import selected_mask
from megatron.training.arguments import parse_args
from megatron.training.data.sampler import batches
from megatron.training.metrics import METRICS_FILE
from megatron.training.pretrain_gpt import start as start_trainer

LOSS_TOLERANCE = 0.02
LAST_STEPS = 50
MODEL = """
    --preset tiny-glm5 --num-layers 4 --hidden-size 512 --num-attention-heads 16 --ffn-hidden-size 1536
    --q-lora-rank 256 --kv-lora-rank 512 --qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64
    --moe-ffn-hidden-size 384 --moe-shared-expert-intermediate-size 384
    --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 512 --dsa-indexer-topk-freq 2
    --recompute-granularity full --bf16
""".split()
# At 1e-3, two runs of one command part by 0.04, since sums in another order grow into other paths. Hence the low rate.
TRAINING = """
    --seq-length 2048 --micro-batch-size 1 --global-batch-size 2 --reset-attention-mask
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --eval-iters 1 --eval-interval 1000
    --log-interval 50 --dsa-log-mass-interval 50
""".split()
LOSSES = {
    "off": ["--dsa-indexer-loss-coeff", "0"],
    "sparse": ["--dsa-indexer-loss-coeff", "1.0", "--dsa-indexer-use-sparse-loss"],
    "dense": ["--dsa-indexer-loss-coeff", "1.0", "--no-dsa-indexer-use-sparse-loss"],
}
PRECISIONS = {
    f"{precision}{' rope_fp32' if rope else ''}": [
        *("--dsa-indexer-scoring-precision", precision),
        "--dsa-indexer-rope-fp32" if rope else "--no-dsa-indexer-rope-fp32",
    ]
    for precision, rope in product(("bf16", "fp8"), (False, True))
}


def make_data(out: Path) -> list[str]:
    """Tokens of the running Python's standard library, once."""
    out.mkdir(parents=True, exist_ok=True)
    prefix = out / "stdlib"
    command = ["--input", "stdlib", "--append-eod", "--output-prefix", str(prefix)]
    subprocess.run([sys.executable, "-m", "megatron.training.preprocess_data", *command], check=True)
    train, valid = f"{prefix}_train_text_document", f"{prefix}_valid_text_document"
    return ["--train-data-path", train, "--valid-data-path", valid]


def start(name: str, flags: list[str], out: Path, gpu: str) -> subprocess.Popen[bytes]:
    """One training run in the background, on one GPU; its log and metrics land in ``out/name``."""
    folder = out / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron.training.pretrain_gpt", *MODEL, *TRAINING, *flags]
    log = (folder / "log.txt").open("wb")
    return subprocess.Popen(
        [*command, "--log-dir", str(folder)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
    )


def lm_losses(name: str, out: Path) -> list[float]:
    """The training losses that a run logged."""
    path = out / name.replace(" ", "_") / METRICS_FILE
    return [json.loads(line)["lm_loss"] for line in path.read_text().splitlines()] if path.is_file() else []


def report(name: str, out: Path, steps: int) -> tuple[str, float]:
    """A table row, and the mean loss of the last steps (NaN where the run did not end well)."""
    losses = lm_losses(name, out)
    if len(losses) < steps or not all(map(math.isfinite, losses)):
        log = (out / name.replace(" ", "_") / "log.txt").read_text(errors="replace").splitlines()
        print("\n".join(log[-15:]), file=sys.stderr)
        return f"| {name} | {len(losses)} steps, then stopped | | |", math.nan
    mean = sum(losses[-LAST_STEPS:]) / LAST_STEPS
    last = json.loads((out / name.replace(" ", "_") / METRICS_FILE).read_text().splitlines()[-1])
    indexer = last["indexer_loss"]
    shown = "-" if indexer is None else f"{indexer:.4f}"
    return f"| {name} | {losses[0]:.4f} | {mean:.4f} | {shown} | {last['dsa_attention_mass']:.3f} |", mean


def selections(flags: list[str]) -> dict[int, Tensor]:
    """Bool ``[rows, keys]`` by layer: what a checkpoint's model selects of the first held-out sample."""
    with ExitStack() as stack:
        trainer = start_trainer(parse_args([*MODEL, *TRAINING, *flags]), stack)
        engine, held_out = trainer.engine, trainer.datasets[1]
        assert held_out is not None
        batch = next(batches(held_out, 0, 1)).to(engine.device)
        engine.model.eval()
        with torch.no_grad(), engine.compute.installed(), record_topk(engine.model) as record:
            engine.model(batch.tokens, packed_seq_params=batch.packed_seq_params)
        return {layer: selected_mask(topk.indices_TK, batch.tokens.numel()) for layer, topk in record.items()}


def report_overlap(flags: list[str], checkpoint: Path, out: Path) -> None:
    """Print what each precision selects against the first, with the weights of ``checkpoint``."""
    common = [*flags, *LOSSES["off"], "--dsa-kernel-backend", "cudnn", "--load", str(checkpoint), "--finetune"]
    found = {}
    for name, extra in PRECISIONS.items():
        folder = out / "overlap" / name.replace(" ", "_")
        found[name] = selections([*common, *extra, "--log-dir", str(folder)])
    names = list(found)
    print("\nSelected keys in common, with equal weights (rows that drop keys):\n")
    print("| | " + " | ".join(names) + " |\n|---|" + "--:|" * len(names))
    for a in names:
        shares = []
        for b in names:
            both = kept = 0
            for layer, mask in found[a].items():
                full = mask.sum(1) == mask.sum(1).max()
                both += int((mask & found[b][layer])[full].sum())
                kept += int(mask[full].sum())
            shares.append(f"{both / kept:.3%}")
        print(f"| {a} | " + " | ".join(shares) + " |")


def planned(only: str | None) -> dict[str, list[str]]:
    """Flags of each run by name."""
    runs: dict[str, list[str]] = {}
    if only != "precision":
        for loss, backend in product(LOSSES, ("cudnn", "none")):
            runs[f"{loss} {backend}"] = [*LOSSES[loss], "--dsa-kernel-backend", backend]
        runs["off cudnn again"] = runs["off cudnn"]
    if only != "kernels":
        for name, flags in PRECISIONS.items():
            runs[name] = [*LOSSES["off"], "--dsa-kernel-backend", "cudnn", *flags]
    return runs


def visible_gpus() -> list[str]:
    """Names that ``CUDA_VISIBLE_DEVICES`` can take, one for each GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def judge(means: dict[str, float]) -> list[str]:
    """What went wrong: runs that failed, and losses in which kernels and reference differ too much."""
    bad = [name for name, mean in means.items() if math.isnan(mean)]
    for loss in LOSSES:
        if f"{loss} none" not in means:
            continue
        difference = abs(means[f"{loss} cudnn"] - means[f"{loss} none"])
        print(f"\n{loss}: kernels and reference differ by {difference:.4f} (allowed {LOSS_TOLERANCE}).")
        if not difference <= LOSS_TOLERANCE:
            bad.append(loss)
    return bad


def main() -> int:
    """Run everything side by side, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("kernels", "precision"))
    arguments = parser.parse_args()
    common = [*make_data(arguments.out), "--train-iters", str(arguments.steps)]
    runs, checkpoint = planned(arguments.only), arguments.out / "weights"
    if "bf16" in runs:
        runs["bf16"] += ["--save", str(checkpoint)]
    gpus = visible_gpus()  # the two of a pair side by side: a reference run is the slow one
    processes = {
        name: start(name, [*common, *flags], arguments.out, gpus[number // 2 % len(gpus)])
        for number, (name, flags) in enumerate(runs.items())
    }
    failed = [name for name, process in processes.items() if process.wait()]
    print(f"\n| run | LM loss, step 1 | LM loss, mean of last {LAST_STEPS} | indexer loss | attention mass |")
    print("|---|--:|--:|--:|--:|")
    means = {}
    for name in runs:
        row, means[name] = report(name, arguments.out, arguments.steps)
        print(row)
    bad = judge(means)
    if "bf16" in runs and not failed:
        report_overlap(common, checkpoint, arguments.out)
    if failed or bad:
        print(f"\nFAILED: {sorted({*failed, *bad})}")
    return 1 if failed or bad else 0


if __name__ == "__main__":
    sys.exit(main())
