"""A model of every part in a few thousand parameters, for the tests of those parts.

Three layers: the first dense, the others experts; the first and third select keys, the second reuses. No width equals
another one that it could be confused with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

_FIELDS: dict[str, Any] = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=61,
    make_vocab_size_divisible_by=16,
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func="silu",
    init_method_std=0.1,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    rope_type="rope",
    num_moe_experts=4,
    moe_layer_freq=[0, 1, 1],
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=40,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=6,
    dsa_indexer_topk_freq=2,
    dsa_indexer_rope_interleaved=True,
    dsa_indexer_scoring_precision="fp32",
    dsa_indexer_loss_coeff=0.5,
    dsa_indexer_use_sparse_loss=True,
)


def tiny_config(**overrides: Any) -> MLATransformerConfig:
    """The configuration above, with fields replaced. The layer list is cut to ``num_layers``."""
    fields = _FIELDS | overrides
    if "moe_layer_freq" not in overrides:
        fields["moe_layer_freq"] = ([0, 1, 1] * fields["num_layers"])[: fields["num_layers"]]
    return MLATransformerConfig(**fields)


def context_of(
    batch: int = 1, length: int = 0, packed: PackedSeqParams | None = None, losses: LossTracker | None = None
) -> ForwardContext:
    """The context of a ``[batch, length]`` input, or of one packed row."""
    if packed is not None:
        assert packed.offsets is not None
        length = (packed.padded_offsets or packed.offsets)[-1]
    return ForwardContext.build(batch, length, packed, "cpu", losses)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by parameter name."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerances: float) -> None:
    """Equal names and close values; bit for bit where no tolerance is given."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, **({"atol": 0.0, "rtol": 0.0} | tolerances), msg=lambda m, n=name: f"{n}: {m}"
        )
