"""Tiny configurations, layouts and operands for the tests of the DSA core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import DSAConfig, Layout, Segment
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    AttentionInputs,
    IndexerInputs,
)

LATENT, ROPE, INDEX_DIM = 6, 4, 8

# Sizes that are no powers of two; K (5) is smaller than most rows' visible keys, else selection shows nothing.
LAYOUTS: dict[str, Layout] = {
    "B1-T13": Layout.causal(1, 13),
    "B3-T7": Layout.causal(3, 7),
    "packed": Layout.packed((0, 9, 10, 10, 21)),
    "padded": Layout.packed((0, 9, 10, 10, 21), (0, 11, 12, 15, 29)),
    "leading-padding": Layout(14, 12, (Segment(3, 14, 1, 0),)),
    "zigzag": Layout.zigzag((0, 13, 30), 2, 0, (0, 16, 36)),
    "slice": Layout.packed((0, 9, 21)).slice_rows(5, 16),
    "tiny-documents": Layout.packed((0, 1, 2, 2, 3, 6)),
    "all-padding": Layout.packed((0, 0), (0, 4)),
    "no-rows": Layout.causal(1, 6).slice_rows(3, 3),
    "nothing": Layout.packed((0,)),
}
# For finite differences, which cost an evaluation an entry.
SMALL: dict[str, Layout] = {
    "padded": Layout.packed((0, 4, 6), (0, 5, 8)),
    "zigzag": Layout.zigzag((0, 7), 2, 0, (0, 8)),
    "all-padding": Layout.packed((0, 0), (0, 2)),
}


def dsa_config(**overrides: Any) -> DSAConfig:
    """K = 5, three indexer heads of width 8, two attention heads of latent width 6 + 4, scoring in the carrier."""
    values: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=2,
        q_lora_rank=10,
        kv_lora_rank=LATENT,
        qk_head_dim=4,
        qk_pos_emb_head_dim=ROPE,
        layernorm_epsilon=1e-5,
        n_heads=3,
        head_dim=INDEX_DIM,
        topk=5,
        loss_coeff=1.0,
        scoring_precision="fp32",
    )
    return DSAConfig(**(values | overrides))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def indexer_operands(layout: Layout, seed: int = 0, dtype: torch.dtype = torch.float64) -> IndexerInputs:
    """Random operands; head weights of both signs. BF16 and FP32 operands get FP32 head weights."""
    weights = torch.promote_types(dtype, torch.float32)
    return IndexerInputs(
        draw(layout.num_rows, 3, INDEX_DIM, seed=seed, dtype=dtype),
        draw(layout.num_keys, INDEX_DIM, seed=seed + 1, dtype=dtype),
        draw(layout.num_rows, 3, seed=seed + 2, dtype=weights),
    )


def attention_operands(
    layout: Layout, seed: int = 10, dtype: torch.dtype = torch.float64, heads: int = 2
) -> AttentionInputs:
    q_THD = draw(layout.num_rows, heads, LATENT + ROPE, seed=seed, dtype=dtype)
    return AttentionInputs(q_THD, draw(layout.num_keys, LATENT + ROPE, seed=seed + 1, dtype=dtype), 0.3)


def with_grad(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Leaves of their own that require gradients."""
    return tuple(t.detach().clone().requires_grad_() for t in tensors)
