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
        ids = topk.indices_TK[row]
        chosen = ids[ids >= 0].long()
        if not _are_best(bench, row, (starts[row], ends[row]), chosen):
            return f"row {row}: the selected keys are not the best ones"
        for name, error in _errors(bench, row, chosen, (output[row], grads[0][row])).items():
            if not error < TOLERANCE:
                return f"row {row}: the {name} is off by {error:.1e}"
    return None


def _are_best(bench: Bench, row: int, bounds: tuple[int, int], chosen: Tensor) -> bool:
    start, end = bounds
    q, k, w = (x.detach() for x in bench.indexer_leaves())
    scores = w[row] @ (q[row].float() @ k[start:end].float().T).relu()
    best = scores.topk(min(bench.workload.k, end - start)).values.sort().values
    return chosen.numel() == best.numel() and torch.allclose(scores[chosen - start].sort().values, best, atol=1e-4)


def _errors(bench: Bench, row: int, chosen: Tensor, found: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Relative errors of a row's output and of its query's gradient."""
    keys = bench.kv.detach()[chosen].float()
    dout_HV = bench.dout[row].float().view(bench.workload.heads, LATENT)
    with torch.enable_grad():
        q_HD = bench.q.detach()[row].float().requires_grad_()
        out_HV = (q_HD @ keys.T * bench.module.softmax_scale).softmax(-1) @ keys[:, :LATENT]
        (dq_HD,) = torch.autograd.grad(out_HV, q_HD, dout_HV)
    pairs = {"output": (found[0], out_HV.detach()), "gradient of q": (found[1], dq_HD)}
    return {
        name: float((ours.float().flatten() - wanted.flatten()).norm() / wanted.norm())
        for name, (ours, wanted) in pairs.items()
        if bool(wanted.any())  # with a single key, the softmax is constant
    }
