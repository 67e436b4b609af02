"""Train a GLM-5-style toy on two GPUs in each kind of parallelism beside one: loss curves, step times, NCCL's share.

    torchrun --standalone --nproc-per-node 2 -m tests.performance_tests.parallel.run [--steps 200] [--out DIR]
    torchrun --standalone --nproc-per-node 2 -m tests.performance_tests.parallel.run --smoke     # CPUs, Gloo, seconds

All runs start from the same weights and see the same samples, four a step: text of the running Python's standard
library (the smoke run makes up tokens). BF16 compute; two layers, hidden 1024, eight experts, latent 512, 32 indexer
heads, top-k 256, sequences of 2048 tokens. The settings of the indexer's precision train without its loss, which FP8
scoring needs. A few runs repeat a few steps with longer sequences, where the GPUs and not their hosts set the pace.

"One GPU" is rank 0 alone while rank 1 waits. The share of communication is the time of NCCL's kernels, waiting
included, over the time of the profiled steps. Runs share ``--seconds``: when they are over, runs stop early, and the
table says after how many steps. Markdown on stdout; exit code 1 if a curve leaves its baseline's by more than
``TOLERANCE`` in the mean of its last steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron.core.models.gpt.presets import get_preset
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import group_rank, group_size
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.config import OptimizerConfig
from megatron.training.data.batch import Batch
from megatron.training.data.build import build_datasets
from megatron.training.data.config import DataConfig
from megatron.training.data.sampler import batches
from megatron.training.optimizer import build_optimizer
from megatron.training.prepare import build_model
from megatron.training.step import Engine, train_step
from megatron.training.tokenizer import build_tokenizer

TOLERANCE = 0.05
LEARNING_RATE = 1e-4
GLOBAL_BATCH, MICRO_BATCH, LAST = 4, 2, 20
PROFILED = 3
SHOWN = (1, 10, 20, 50, 100, 150, 200)


TP_SP = (("tensor_model_parallel_size", 2), ("sequence_parallel", True))
CP = (("context_parallel_size", 2),)
EP = (("expert_model_parallel_size", 2),)
LOSS_OFF = (("dsa_indexer_loss_coeff", None), ("dsa_indexer_use_sparse_loss", False))
PRECISIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "bf16": (),
    "bf16 rope_fp32": (("dsa_indexer_rope_fp32", True),),
    "fp8": (("dsa_indexer_scoring_precision", "fp8"),),
    "fp8 rope_fp32": (("dsa_indexer_scoring_precision", "fp8"), ("dsa_indexer_rope_fp32", True)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, and the one that its curve is held against."""

    name: str
    baseline: str
    options: tuple[tuple[str, Any], ...] = ()
    world: int = 2
    packed: bool = False
    times: int = 1
    """Sequences are this many times as long, and a tenth of the steps are made."""


CASES = [
    Case("one GPU", "one GPU", world=1),
    Case("one GPU again", "one GPU", world=1),
    Case("one GPU, packed", "one GPU, packed", world=1, packed=True),
    Case("TP 2 + SP", "one GPU", TP_SP),
    Case("CP 2", "one GPU", CP),
    Case("CP 2, packed", "one GPU, packed", CP, packed=True),
    Case("EP 2", "one GPU", EP),
    Case("one GPU, long", "one GPU, long", world=1, times=8),
    Case("TP 2 + SP, long", "one GPU, long", TP_SP, times=8),
    Case("CP 2, long", "one GPU, long", CP, times=8),
    Case("EP 2, long", "one GPU, long", EP, times=8),
    *(Case(f"one GPU, {name}", "one GPU, bf16", LOSS_OFF + options, world=1) for name, options in PRECISIONS.items()),
    *(Case(f"EP 2, {name}", f"one GPU, {name}", EP + LOSS_OFF + options) for name, options in PRECISIONS.items()),
]


def planned(arguments: argparse.Namespace) -> list[Case]:
    """The cases asked for and their baselines. FP8 scoring is the kernels' alone."""
    fp8 = ("dsa_indexer_scoring_precision", "fp8")
    able = [case for case in CASES if arguments.backend == "cudnn" or fp8 not in case.options]
    chosen = [case for case in able if re.search(arguments.cases, case.name)]
    baselines = {case.baseline for case in chosen}
    return [case for case in able if case in chosen or case.name in baselines]


def make_config(case: Case, backend: str, smoke: bool) -> MLATransformerConfig:
    wide = dict(
        hidden_size=1024,
        num_attention_heads=16,
        ffn_hidden_size=3072,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        moe_ffn_hidden_size=512,
        moe_shared_expert_intermediate_size=512,
        dsa_indexer_n_heads=32,
        dsa_indexer_head_dim=128,
        dsa_indexer_topk=256,
        bf16=True,
    )
    common = dict(
        num_layers=2,
        moe_layer_freq=[0, 1],
        num_moe_experts=8,
        moe_router_topk=2,
        vocab_size=257,
        dsa_indexer_topk_freq=1,
        dsa_indexer_loss_coeff=1.0,
        dsa_indexer_use_sparse_loss=True,
        dsa_kernel_backend=backend,
        cp_comm_type="allgather",
    )
    shape = common if smoke else common | wide
    return dataclasses.replace(get_preset("tiny-glm5"), **shape | dict(case.options))


def make_engine(config: MLATransformerConfig, groups: ProcessGroupCollection, device: torch.device) -> Engine:
    torch.manual_seed(1234)
    model, compute = build_model(config, groups, device)
    optimizer = OptimizerConfig(lr=LEARNING_RATE, adam_beta2=0.95, weight_decay=0.1)
    adam = build_optimizer(model, optimizer)
    return Engine(model, compute, adam, device, optimizer, config.calculate_per_token_loss, True, groups)


def make_data(out: Path) -> tuple[str, ...]:
    """The standard library's tokens, written by rank 0."""
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron.training.preprocess_data", "--input", "stdlib", "--append-eod"]
        subprocess.run([*command, "--output-prefix", str(out / "stdlib")], check=True, stdout=sys.stderr)
    dist.barrier()
    return (str(out / "stdlib_train_text_document"),)


def make_stream(
    case: Case, groups: ProcessGroupCollection, arguments: argparse.Namespace, steps: int
) -> Iterator[Batch]:
    length = case.times * (32 if arguments.smoke else 2048)
    source: dict[str, Any] = {"mock_data": True} if arguments.smoke else {"train_data_path": arguments.data}
    data = DataConfig(**source, seq_length=length, reset_attention_mask=case.packed)
    tokenizer = build_tokenizer("ByteLevelTokenizer", None, None)
    dataset = build_datasets(data, (steps * GLOBAL_BATCH, 0, 0), tokenizer)[0]
    assert dataset is not None
    return batches(dataset, 0, MICRO_BATCH, group_rank(groups.dp), group_size(groups.dp))


def communication(device: torch.device, steps: Iterator[None]) -> float:
    """Share of communication in the time of some steps."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    started = time.perf_counter()
    with profile(activities=[activity]) as recorded:
        for _ in steps:
            pass
    seconds = time.perf_counter() - started
    events = [event for event in recorded.key_averages() if "nccl" in event.key.lower() or "gloo:" in event.key]
    busy = sum(e.device_time_total if device.type == "cuda" else e.cpu_time_total for e in events) / 1e6
    return busy / seconds


def run(case: Case, arguments: argparse.Namespace, device: torch.device, deadline: float) -> dict[str, Any]:
    """Train one case on this rank; figures are the same on every rank that takes part."""
    config = make_config(case, arguments.backend, arguments.smoke)
    sizes = ParallelSizes.of(config, case.world)
    groups = build_process_groups(sizes, device.type)
    engine = make_engine(config, groups, device)
    steps = max(arguments.steps // 10, 1) if case.times > 1 else arguments.steps
    stream = make_stream(case, groups, arguments, steps + PROFILED)
    passes = GLOBAL_BATCH // (MICRO_BATCH * sizes.data)
    losses, indexer, seconds = [], [], []
    for step in range(steps):
        started = time.perf_counter()
        result = train_step(engine, list(islice(stream, passes)), min(1.0, (step + 1) / 20) * LEARNING_RATE)
        seconds.append(time.perf_counter() - started)
        losses.append(result.lm_loss)
        indexer.append(statistics.mean(result.indexer_losses.values() or [0.0]))
        if step % 10 == 9 and _all_agree(time.monotonic() > deadline, groups, device):
            break
    share = communication(device, _profiled(engine, stream, passes))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "losses": losses,
        "indexer": indexer,
        "step_ms": 1e3 * statistics.median(seconds[len(seconds) // 4 :]),
        "communication": share,
        "peak_gib": peak,
    }


def _profiled(engine: Engine, stream: Iterator[Batch], passes: int) -> Iterator[None]:
    for _ in range(PROFILED):
        train_step(engine, list(islice(stream, passes)), 0.0)
        yield


def _all_agree(over: bool, groups: ProcessGroupCollection, device: torch.device) -> bool:
    if groups.world is None:
        return over
    flag = torch.tensor(int(over), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=groups.world)
    return bool(flag)


def report(results: dict[str, dict[str, Any]]) -> list[str]:
    """Print the tables; returns the names of runs that left their curve."""
    print(
        "| run | steps | step ms | communication | peak GiB | last loss | baseline's | largest difference | indexer |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    bad = []
    for case in (case for case in CASES if case.name in results):
        got, base = results[case.name], results[case.baseline]
        count = min(len(got["losses"]), len(base["losses"]))
        last = max(count - LAST, 0)
        ours, theirs = statistics.mean(got["losses"][last:count]), statistics.mean(base["losses"][last:count])
        gap = max(abs(a - b) for a, b in zip(got["losses"][:count], base["losses"][:count], strict=True))
        bad += [case.name] if not abs(ours - theirs) <= TOLERANCE else []
        figures = (
            f"{got['step_ms']:.1f} | {got['communication']:.1%} | {got['peak_gib']:.2f} | {ours:.4f} | {theirs:.4f}"
        )
        print(f"| {case.name} | {len(got['losses'])} | {figures} | {gap:.4f} | {got['indexer'][-1]:.4f} |")
    print("\nLM loss at step\n\n| run | " + " | ".join(map(str, SHOWN)) + " |\n|---|" + "--:|" * len(SHOWN))
    for name, result in results.items():
        at = [f"{result['losses'][s - 1]:.4f}" if s <= len(result["losses"]) else "" for s in SHOWN]
        print(f"| {name} | " + " | ".join(at) + " |")
    return bad


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all runs together; the last ones fall short")
    parser.add_argument("--cases", default="", help="regular expression of the cases' names")
    parser.add_argument("--backend", default=None, help="cudnn (on a GPU) or none")
    parser.add_argument("--out", type=Path, default=Path("parallel-run"), help="folder for the data and curves.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on CPUs")
    arguments = parser.parse_args()
    arguments.backend = arguments.backend or ("none" if arguments.smoke else "cudnn")
    return arguments


def main() -> int:
    arguments = parse()
    device = torch.device("cpu") if arguments.smoke else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if arguments.smoke else "nccl", device_id=None if arguments.smoke else device)
    arguments.data = () if arguments.smoke else make_data(arguments.out)
    results = run_cases(arguments, device)
    bad = report(results) if dist.get_rank() == 0 else []
    if dist.get_rank() == 0 and not arguments.smoke:
        (arguments.out / "curves.json").write_text(json.dumps(results))
    for name in bad:
        print(f"{name} left its baseline's curve by more than {TOLERANCE}.", file=sys.stderr)
    dist.destroy_process_group()
    return int(bool(bad))


def run_cases(arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """All runs, one after the other; whoever is under way when time is up stops early, and the rest make ten steps."""
    started, results = time.monotonic(), {}
    cases = planned(arguments)
    for case in cases:
        if case.world > 1 or dist.get_rank() == 0:
            results[case.name] = run(case, arguments, device, started + arguments.seconds)
            if dist.get_rank() == 0:
                print(f"{case.name}: {results[case.name]['step_ms']:.1f} ms a step", file=sys.stderr, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
    return results


if __name__ == "__main__":
    sys.exit(main())
