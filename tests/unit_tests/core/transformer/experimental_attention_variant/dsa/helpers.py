"""Tiny configurations, layouts and operands for the tests of the DSA core."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAConfig,
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
    Layout,
    LossTracker,
    Segment,
    TopKCache,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    AttentionInputs,
    IndexerInputs,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import positions
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

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


_MODEL: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=2,
    q_lora_rank=10,
    kv_lora_rank=LATENT,
    qk_head_dim=4,
    qk_pos_emb_head_dim=ROPE,
    v_head_dim=3,
    rope_type="rope",
    rotary_base=100.0,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func="silu",
    params_dtype=torch.float64,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=3,
    dsa_indexer_head_dim=INDEX_DIM,
    dsa_indexer_topk=5,
    dsa_indexer_k_norm_epsilon=1e-6,
    dsa_indexer_loss_coeff=0.7,
    dsa_indexer_use_sparse_loss=True,
    dsa_indexer_scoring_precision="fp32",
)


def model_config(**overrides: Any) -> MLATransformerConfig:
    """The same widths as ``dsa_config``, FP64; overrides may leave ``dsa_indexer_`` out."""
    known = {field.name for field in fields(MLATransformerConfig)}
    named = {name if name in known else f"dsa_indexer_{name}": value for name, value in overrides.items()}
    return MLATransformerConfig(**(_MODEL | named))


INDEXER_SPEC = ModuleSpec(
    DSAIndexer,
    submodules=DSAIndexerSubmodules(
        linear_wq_b=ReplicatedLinear, linear_wk=ReplicatedLinear, linear_weights_proj=ReplicatedLinear
    ),
)


def build_attention(config: MLATransformerConfig, layer_number: int = 1, seed: int = 0) -> DSAttention:
    """A layer with random weights, key norm's included: a weight of one and a bias of zero hide mistakes."""
    attention = DSAttention(config, DSAttentionSubmodules(indexer=INDEXER_SPEC), layer_number)
    randomize(attention, seed)
    return attention


def randomize(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = draw(*parameter.shape, seed=seed + 100 + number)
            parameter.copy_(values if parameter.dim() == 1 else values * parameter.shape[-1] ** -0.5)


class Inputs(NamedTuple):
    """What a layer attends with: query ``[T, H, D]``, key ``[S, D]``, x ``[T, C]``, query latent ``[T, R]``."""

    query: Tensor
    key: Tensor
    x: Tensor
    qr: Tensor

    def leaves(self) -> Inputs:
        return Inputs(*with_grad(*self))

    def gradients(self) -> list[Tensor | None]:
        return [t.grad for t in self]


def layer_inputs(rows: int, seed: int = 50, dtype: torch.dtype = torch.float64, heads: int = 2) -> Inputs:
    """One rank's inputs: as many keys as rows."""
    shapes = ((rows, heads, LATENT + ROPE), (rows, LATENT + ROPE), (rows, 24), (rows, 10))
    return Inputs(*(draw(*shape, seed=seed + number, dtype=dtype) for number, shape in enumerate(shapes)))


def context_for(layout: Layout, losses: LossTracker | None = None) -> ForwardContext:
    return ForwardContext(layout, positions(layout, "cpu"), TopKCache(), losses or LossTracker())


# 21 tokens in three documents (and an empty one), padded to 29 rows.
PADDED = Layout.packed((0, 9, 10, 10, 21), (0, 11, 12, 15, 29))


def run(attention: DSAttention, inputs: Inputs, layout: Layout = PADDED, **options: Any) -> Tensor:
    losses = options.pop("losses", None)
    output: Tensor = attention(
        inputs.query, inputs.key, x=inputs.x, qr=inputs.qr, context=context_for(layout, losses), **options
    )
    return output


def indexer_gradients(attention: DSAttention) -> dict[str, Tensor]:
    assert attention.indexer is not None
    return {name: p.grad.clone() for name, p in attention.indexer.named_parameters() if p.grad is not None}
