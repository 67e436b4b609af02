"""The gate before the clock: sampled rows of a benchmark case against the FP32 math, written out on the spot.

Selections are compared by score (ties may differ), the output and dq by their relative error, gradients of keys and
of the indexer by being finite: the backend suite compares those in full, at sizes where a full comparison fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.layout import row_bounds

from .workloads import LATENT, Bench

SAMPLES = 32
TOLERANCE = 1e-2


def check(bench: Bench) -> str | None:
    """Why the case must not be timed, or None."""
    backend, k = bench.module.backend, bench.workload.k
    topk = backend.select(bench.indexer, bench.layout, k)
    output = bench.forward().detach()
    grads = bench.forward_backward()
    if not all(bool(torch.isfinite(grad).all()) for grad in grads):
        return "a gradient is not finite"
    starts, ends = (bounds.tolist() for bounds in row_bounds(bench.layout, output.device))
    rows = torch.linspace(0, bench.layout.num_rows - 1, SAMPLES).long().tolist()
    for row in rows:
        reason = _check_row(bench, row, (starts[row], ends[row]), topk.indices_TK[row], output[row])
        if reason:
            return f"row {row}: {reason}"
    return None


def _check_row(bench: Bench, row: int, bounds: tuple[int, int], ids: Tensor, output: Tensor) -> str | None:
    start, end = bounds
    q, k, w = (x.detach() for x in bench.indexer_leaves())
    scores = w[row] @ (q[row].float() @ k[start:end].float().T).relu()
    chosen = ids[ids >= 0].long()
    best = scores.topk(min(bench.workload.k, end - start)).values.sort().values
    if chosen.numel() != best.numel() or not torch.allclose(scores[chosen - start].sort().values, best, atol=1e-4):
        return "the selected keys are not the best ones"
    keys = bench.kv.detach()[chosen].float()
    weights = (bench.q.detach()[row].float() @ keys.T * bench.module.softmax_scale).softmax(-1)
    wanted = (weights @ keys[:, :LATENT]).flatten()
    error = float((output.float() - wanted).norm() / wanted.norm())
    return None if error < TOLERANCE else f"output is off by {error:.1e}"
