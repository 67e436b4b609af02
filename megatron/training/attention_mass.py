"""Attention mass: how much of what dense attention would look at does the selection hold?

For a few rows, the probabilities of dense attention over all visible keys are computed from the same queries and
keys that DSA attended with; the mass is the share of them that falls on the selected keys, the mean over heads,
rows and layers. 1 means that the selection loses nothing. Only rows that see more keys than they select count,
since all others hold everything. Rows are spread evenly over those, by host integers alone.

Tensor- and context-parallel ranks sample the rows that one process would, of the documents of all of them. Each
measures those that it holds, for its own heads, against all keys (gathered once more), and the ranks sum what they
found. So the figure does not depend on how rows and heads are shared out, and each of these ranks knows it.
Data-parallel ranks measure their own micro-batches.

Measured by forward hooks that exist only while a pass is measured, so that other steps pay nothing; the hooks go
before backward begins, so activation recompute does not measure again. Layers that reuse a selection are measured
too: their queries are their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.tensor_parallel.mappings import group_size
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, Layout, Segment

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


def held_rows(rows: list[tuple[int, int, int]], layout: Layout) -> list[tuple[int, int, int]]:
    """Those of ``rows``, sampled from a layout of the same keys, that ``layout`` holds, as it numbers them."""
    segments: dict[int, list[Segment]] = defaultdict(list)
    for segment in layout.segments:
        segments[segment.key_start].append(segment)
    held = []
    for _, start, stop in rows:
        for segment in segments[start]:
            i = stop - start - 1 - segment.causal_offset
            if 0 <= i < segment.num_rows:
                held.append((segment.row_start + i, start, stop))
    return held


@torch.no_grad()
def attention_mass(
    q_THD: Tensor, kv_SD: Tensor, scale: float, indices_TK: Tensor, rows: list[tuple[int, int, int]]
) -> Tensor:
    """Sum over ``rows`` (as ``sampled_rows`` gives them) of their masses, each the mean over heads; FP32 scalar.

    Args:
        q_THD: queries ``[T, H, D]``.
        kv_SD: latent keys ``[S, D]``.
        scale: factor on the logits.
        indices_TK: selected keys ``[T, K]``, padded by -1.
    """
    device, (num_keys, heads) = q_THD.device, (kv_SD.shape[0], q_THD.shape[1])
    bounds = torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device)
    keys, key_ids = kv_SD.float(), torch.arange(num_keys, device=device)
    total = torch.zeros((), device=device)
    for chunk in bounds.split(max(1, _LOGITS_AT_ONCE // (num_keys * heads))):
        row, start, stop = (column[:, None] for column in chunk.unbind(1))
        logits_RHS = torch.einsum("rhd,sd->rhs", q_THD[chunk[:, 0]].float(), keys) * scale
        visible_RS = (key_ids >= start) & (key_ids < stop)
        probs_RS = logits_RHS.masked_fill(~visible_RS[:, None], float("-inf")).softmax(-1).mean(1)
        ids_RK = indices_TK[row.squeeze(1)].long()
        total += (probs_RS.gather(1, ids_RK.clamp(min=0)) * (ids_RK >= 0)).sum()
    return total


class MassProbe:
    """Measures the layers of one forward pass.

    Attributes:
        by_layer: mass by layer number (1-based); empty where no row sees more keys than it selects.
    """

    def __init__(self, rows: int) -> None:
        self.by_layer: dict[int, Tensor] = {}
        self._rows = rows
        self._whole: Layout | None = None

    @contextmanager
    def watching(self, model: nn.Module, layout: Layout | None = None) -> Iterator[None]:
        """Measure the forward pass that runs inside.

        Args:
            model: every DSA layer inside is measured.
            layout: rows of all tensor- and context-parallel ranks; None where this process holds them all.
        """
        self._whole = layout
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
        rows = sampled_rows(self._whole or context.layout, layer.dsa.topk, self._rows)
        topk = context.topk_cache.get(layer.source_layer)
        if not rows or topk is None:
            return
        keys = layer.shards.gather_keys(key.detach().flatten(1), None, context)[0].wait()
        held = held_rows(rows, context.layout)
        total = attention_mass(query.detach(), keys, layer.softmax_scale, topk.indices_TK, held)
        for group in (layer.shards.tp, layer.shards.cp):
            if group_size(group) > 1:
                dist.all_reduce(total, group=group)
        self.by_layer[layer.layer_number] = total / (len(rows) * group_size(layer.shards.tp))
