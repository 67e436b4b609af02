"""Attention mass: how much of what dense attention would look at does the selection hold?

For a few rows, the probabilities of dense attention over all visible keys are computed from the same queries and
keys that DSA attended with; the mass is the share of them that falls on the selected keys, the mean over heads,
rows and layers. 1 means that the selection loses nothing. Only rows that see more keys than they select count,
since all others hold everything. Rows are spread evenly over those, by host integers alone.

Measured by forward hooks that exist only while a pass is measured, so that other steps pay nothing; the hooks go
before backward begins, so activation recompute does not measure again. Layers that reuse a selection are measured
too: their queries are their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, Layout

# Logits of this many (row, head, key) triples are held at once: 256 MB in FP32.
_LOGITS_AT_ONCE = 2**26


def sampled_rows(layout: Layout, topk: int, count: int) -> list[tuple[int, int, int]]:
    """Up to ``count`` rows that see more than ``topk`` keys, as (row, first key, last key + 1), spread evenly."""
    choices = []
    for segment in layout.segments:
        first = max(0, topk - segment.causal_offset)
        choices.append((segment, first, max(0, segment.num_rows - first)))
    total = sum(rows for _, _, rows in choices)
    picked = [place * total // count for place in range(count)] if total > count else list(range(total))
    rows, before, at = [], 0, 0
    for segment, first, available in choices:
        while at < len(picked) and picked[at] < before + available:
            i = first + picked[at] - before
            rows.append((segment.row_start + i, segment.key_start, segment.key_start + segment.causal_offset + i + 1))
            at += 1
        before += available
    return rows


@torch.no_grad()
def attention_mass(
    q_THD: Tensor, kv_SD: Tensor, scale: float, indices_TK: Tensor, rows: list[tuple[int, int, int]]
) -> Tensor:
    """Mean mass of ``rows`` (as ``sampled_rows`` gives them), FP32 scalar.

    Args:
        q_THD: queries ``[T, H, D]``.
        kv_SD: latent keys ``[S, D]``.
        scale: factor on the logits.
        indices_TK: selected keys ``[T, K]``, padded by -1.
    """
    device, (num_keys, heads) = q_THD.device, (kv_SD.shape[0], q_THD.shape[1])
    bounds = torch.tensor(rows, dtype=torch.int64).to(device)
    keys, key_ids = kv_SD.float(), torch.arange(num_keys, device=device)
    total = torch.zeros((), device=device)
    for chunk in bounds.split(max(1, _LOGITS_AT_ONCE // (num_keys * heads))):
        row, start, stop = (column[:, None] for column in chunk.unbind(1))
        logits_RHS = torch.einsum("rhd,sd->rhs", q_THD[chunk[:, 0]].float(), keys) * scale
        visible_RS = (key_ids >= start) & (key_ids < stop)
        probs_RS = logits_RHS.masked_fill(~visible_RS[:, None], float("-inf")).softmax(-1).mean(1)
        ids_RK = indices_TK[row.squeeze(1)].long()
        total += (probs_RS.gather(1, ids_RK.clamp(min=0)) * (ids_RK >= 0)).sum()
    return total / len(rows)


class MassProbe:
    """Measures the layers of one forward pass.

    Attributes:
        by_layer: mass by layer number (1-based); empty where no row sees more keys than it selects.
    """

    def __init__(self, rows: int) -> None:
        self.by_layer: dict[int, Tensor] = {}
        self._rows = rows

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Measure the forward pass that runs inside."""
        layers = [module for module in model.modules() if isinstance(module, DSAttention)]
        hooks = [layer.register_forward_hook(self._measure, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _measure(self, layer: DSAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        query, key = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key")))
        context = kwargs["context"]
        rows = sampled_rows(context.layout, layer.dsa.topk, self._rows)
        topk = context.topk_cache.get(layer.source_layer)
        if rows and topk is not None:
            keys = key.detach().flatten(1)
            mass = attention_mass(query.detach(), keys, layer.softmax_scale, topk.indices_TK, rows)
            self.by_layer[layer.layer_number] = mass
