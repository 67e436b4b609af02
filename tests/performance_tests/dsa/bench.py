"""Time the cudnn backend's attention core against the bare kernels that it must run, and against a released peer.

    python -m tests.performance_tests.dsa.bench                        # every case, Markdown on stdout
    python -m tests.performance_tests.dsa.bench --cases 'S8192 sparse' # those whose name contains all the words
    python -m tests.performance_tests.dsa.bench --peer megatron-core   # also the released package, in a subprocess

A case is timed only after its outputs and gradients were checked against the reference on sampled rows; a red check
prints no time. TFLOP/s counts the work of the sparse attention alone (forward 2, backward 5 products over the
selected keys) over its kernels' time, and "share" is that over the card's measured BF16 ceiling. "Scratch" is
peak memory that is neither input, output, saved operand nor gradient: the byte budget of scoring bounds it. Times of
the bare kernels one by one, and of the log-sum-exp kernel of our own, which the sum leaves out, go to stderr.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .check import check
from .timing import GIB, milliseconds, peak_gib
from .workloads import LATENT, ROPE, Bench, Workload

CEILING_TFLOPS = 790.0
PEER = Path(__file__).with_name("peer_megatron_core.py")
PEER_MAX_TOKENS = 65536

CASES = [
    *(Workload(64, 64, (s,), loss) for s in (8192, 32768) for loss in ("off", "sparse", "dense")),
    *(Workload(64, 64, (32768,), loss, recompute=True) for loss in ("off", "sparse", "dense")),
    Workload(64, 64, (16384,), "dense"),
    Workload(64, 32, (32768,), "sparse"),
    Workload(128, 64, (8192,), "sparse"),
    Workload(128, 64, (32768,), "sparse"),
    Workload(64, 64, (8192,) * 4),
    Workload(64, 64, (8192,) * 4, "sparse"),
    Workload(64, 64, (8192,) * 4, "dense"),
    *(Workload(64, 64, (1024,) * 32, loss, k=512) for loss in ("off", "sparse", "dense")),
    *(Workload(64, 64, (65536,), loss, cp_size=8) for loss in ("off", "sparse", "dense")),
    # A user's public configuration: batch 1, CP 2, topk_freq 4, offset 1, loss coefficient 0.001: one layer in four
    # selects and the other three reuse its keys.
    Workload(64, 32, (8192,), "sparse", k=1024, cp_size=2),
    Workload(64, 32, (8192,), "sparse", k=1024, cp_size=2, reuses=True),
    *(Workload(64, 64, (s,), loss) for s in (65536, 131072) for loss in ("off", "sparse", "dense")),
]
HEADER = (
    "| case | fwd ms | fwd+bwd ms | bare kernels ms | ratio | attention TFLOP/s | share | peak GiB | scratch GiB "
    "| peer fwd / fwd+bwd ms, GiB |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def attention_tflops(workload: Workload, selected: float, forward_backward_ms: float) -> float:
    """Multiply-adds of the selected keys, forward (QK, PV) and backward (QK, dP, dV, dQ, dK)."""
    width, value = LATENT + ROPE, LATENT
    return 2 * workload.heads * selected * (4 * width + 3 * value) / forward_backward_ms / 1e9


def measure(workload: Workload, device: torch.device) -> str:
    """One row of the table."""
    bench = Bench(workload, device)
    if reason := check(bench):
        return f"| {workload.name} | CHECK FAILED: {reason} |"
    forward, both = milliseconds(bench.forward), milliseconds(bench.forward_backward)
    peak, scratch = memory(bench)
    topk = bench.module.backend.select(bench.indexer, bench.layout, workload.k)
    floor, details = "-", {}
    if not (workload.reuses or workload.recompute):
        from .bare import OWN_LSE, bare_milliseconds

        details = bare_milliseconds(bench, topk.indices_TK, topk.length_T)
        floor = f"{sum(ms for name, ms in details.items() if name != OWN_LSE):.1f}"
    ratio = f"{both / float(floor):.2f}" if details else "-"
    attention = sum(ms for name, ms in details.items() if name.startswith("attention"))
    tflops = attention_tflops(workload, float(topk.length_T.sum()), attention) if attention else 0.0
    for name, ms in details.items():
        print(f"  {workload.name}: {name} {ms:.2f} ms", file=sys.stderr)
    return (
        f"| {workload.name} | {forward:.1f} | {both:.1f} | {floor} | {ratio} | {tflops:.0f} | "
        f"{tflops / CEILING_TFLOPS:.0%} | {peak:.2f} | {scratch:.2f} |"
    )


def memory(bench: Bench) -> tuple[float, float]:
    """Peak GiB beyond the inputs, and the part of it that is neither output, saved operand nor gradient."""
    forward_peak, saved, output = peak_gib(bench.forward)
    assert isinstance(output, torch.Tensor)
    backward_peak, _, grads = peak_gib(lambda: torch.autograd.grad(output, bench.leaves(), bench.dout))
    grad_gib = sum(grad.nbytes for grad in grads) / GIB  # type: ignore[attr-defined]
    return max(forward_peak, saved + backward_peak), max(forward_peak - saved, backward_peak - grad_gib)


class Peer:
    """The released megatron-core, in a process that does not see this tree; it starts with the first case.

    Args:
        path: folder that the package was installed to.
    """

    def __init__(self, path: str) -> None:
        here = {"", ".", str(Path.cwd())}
        others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in here]
        search = {"PYTHONPATH": os.pathsep.join(filter(None, [path, *others])), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(PEER)]
        self._process = subprocess.Popen(
            command, env=os.environ | search, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, workload: Workload) -> str:
        """Its figures for the same case, or why there are none."""
        if len(workload.documents) > 1 or workload.cp_size > 1 or workload.reuses or workload.recompute:
            return "-"
        if workload.documents[0] > PEER_MAX_TOKENS:
            return "-"
        assert self._process.stdin is not None and self._process.stdout is not None
        figures = workload.heads, workload.index_heads, workload.documents[0], workload.loss, workload.k
        if self._process.poll() is None:
            print(*figures, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("failed") or " / " in line:  # libraries print notices too
                return line.strip()
        return "failed: its process ended"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="words that a case's name must contain")
    parser.add_argument("--peer", choices=["megatron-core"], help="also time this released package")
    parser.add_argument("--peer-path", default="", help="folder that the package was installed to (pip --target)")
    options: Any = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}\n\n{HEADER}", flush=True)
    peer = Peer(options.peer_path) if options.peer else None
    for workload in CASES:
        words = set(workload.name.split())
        if not set(options.cases.split()) <= words:
            continue
        row = measure(workload, device)
        torch.cuda.empty_cache()
        print(f"{row} {peer.measure(workload) if peer else '-'} |", flush=True)


if __name__ == "__main__":
    main()
