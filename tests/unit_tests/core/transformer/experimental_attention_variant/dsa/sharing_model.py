"""A stack of DSA layers that share selections, for the tests of IndexShare, the recorder and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

from .helpers import LATENT, ROPE, build_attention, draw, model_config, randomize

# Layers 1, 2 and 5 select; 3 and 4 reuse layer 2's keys.
PATTERN: dict[str, Any] = {"num_layers": 5, "topk_freq": 3, "skip_topk_offset": 2, "topk": 3}
LAYOUTS = {"batch": Layout.causal(2, 7), "packed": Layout.packed((0, 5, 12), (0, 6, 14))}


class Layer(nn.Module):
    def __init__(self, config: MLATransformerConfig, number: int) -> None:
        super().__init__()
        self.project = nn.Linear(24, 2 * (LATENT + ROPE) + LATENT + ROPE + 10, dtype=torch.float64)
        self.attention = build_attention(config, number)
        self.output = nn.Linear(2 * LATENT, 24, dtype=torch.float64)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        query, key, qr = self.project(x).split((2 * (LATENT + ROPE), LATENT + ROPE, 10), dim=-1)
        attended = self.attention(query.unflatten(-1, (2, -1)), key, x=x, qr=qr, context=context)
        return x + self.output(attended).sin()


class Model(nn.Module):
    """Layers of a model, with or without activation recompute."""

    def __init__(self, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.config, self.recompute = model_config(**(PATTERN | options)), recompute
        self.layers = nn.ModuleList(Layer(self.config, n + 1) for n in range(self.config.num_layers))
        randomize(self, seed=7)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, context, use_reentrant=False) if self.recompute else layer(x, context)
        return x

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def selecting(self) -> list[int]:
        return [layer.attention.layer_number for layer in self.layers if layer.attention.indexer is not None]


def microbatch(number: int, rows: int = 14) -> Tensor:
    return draw(rows, 24, seed=1000 + number)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and actual
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different, different


def count_selections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    select = ReferenceBackend.select

    def counted(self: ReferenceBackend, *args: Any) -> TopK:
        calls.append(1)
        return select(self, *args)

    monkeypatch.setattr(ReferenceBackend, "select", counted)
    return calls


def other_keys(layout: Layout, k: int = 3) -> TopK:
    """Keys that no indexer would select: the earliest visible ones, at most ``k`` and at least two steps apart."""
    starts, ends = (bound.tolist() for bound in row_bounds(layout, "cpu"))
    rows = [list(range(a, b))[::2][:k] for a, b in zip(starts, ends, strict=True)]
    ids = torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)
    return TopK(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32), None)
