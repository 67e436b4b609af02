"""Published model shapes, and one that a laptop trains.

``glm-5``, ``glm-5.2`` and ``deepseek-v3.2`` are what importing the released checkpoints' configurations gives: norms,
rotary pairs and indexer as transformers computes them (so no Hadamard rotation, and 1e-6 in the latent and key norms).
Multi-token prediction layers are left out. Options of a training run (precision, indexer loss, kernels, recompute) are
for the caller to set; only ``tiny-glm5`` sets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

# What released DSA models have in common.
_RELEASED: dict[str, Any] = dict(
    normalization="RMSNorm",
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func="silu",
    untie_embeddings_and_output_weights=True,
    attention_latent_norm_epsilon=1e-6,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    experimental_attention_variant="dsa",
    dsa_indexer_rotate_activation=False,
    dsa_indexer_k_norm_epsilon=1e-6,
    dsa_indexer_topk_freq=1,
    dsa_indexer_skip_topk_offset=1,
)

_LARGE: dict[str, Any] = _RELEASED | dict(
    kv_lora_rank=512,
    qk_pos_emb_head_dim=64,
    num_moe_experts=256,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
    moe_router_topk_scaling_factor=2.5,
    dsa_indexer_head_dim=128,
    dsa_indexer_topk=2048,
)

_GLM_5: dict[str, Any] = _LARGE | dict(
    num_layers=78,
    hidden_size=6144,
    num_attention_heads=64,
    ffn_hidden_size=12288,
    vocab_size=154880,
    max_position_embeddings=202752,
    layernorm_epsilon=1e-5,
    q_lora_rank=2048,
    qk_head_dim=192,
    v_head_dim=256,
    rope_type="rope",
    rotary_base=1e6,
    moe_layer_freq=[0] * 3 + [1] * 75,
    dsa_indexer_n_heads=32,
    dsa_indexer_rope_interleaved=True,
)


def glm_5() -> MLATransformerConfig:
    """GLM-5: 744B parameters, 40B active."""
    return MLATransformerConfig(**_GLM_5)


def glm_5_2() -> MLATransformerConfig:
    """GLM-5.2: GLM-5 with IndexShare (21 layers select keys, 57 reuse them) and a context of 1M tokens."""
    shared = dict(
        rotary_base=8e6, max_position_embeddings=1048576, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3
    )
    return MLATransformerConfig(**(_GLM_5 | shared))


def deepseek_v3_2() -> MLATransformerConfig:
    """DeepSeek-V3.2: 671B parameters, 37B active."""
    fields = _LARGE | dict(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        ffn_hidden_size=18432,
        vocab_size=129280,
        max_position_embeddings=163840,
        layernorm_epsilon=1e-6,
        q_lora_rank=1536,
        qk_head_dim=128,
        v_head_dim=128,
        rope_type="yarn",
        rotary_base=1e4,
        rotary_scaling_factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        moe_layer_freq=[0] * 3 + [1] * 58,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        dsa_indexer_n_heads=64,
        dsa_indexer_rope_interleaved=False,
    )
    return MLATransformerConfig(**fields)


def tiny_glm5() -> MLATransformerConfig:
    """GLM-5's structure in 1.5M parameters, for a few minutes on two CPU cores; bytes are its tokens."""
    fields = _RELEASED | dict(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        ffn_hidden_size=384,
        vocab_size=257,
        max_position_embeddings=4096,
        layernorm_epsilon=1e-5,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_head_dim=32,
        qk_pos_emb_head_dim=16,
        v_head_dim=32,
        rope_type="rope",
        rotary_base=1e4,
        num_moe_experts=8,
        moe_layer_freq=[0, 1, 1, 1],
        moe_ffn_hidden_size=96,
        moe_shared_expert_intermediate_size=96,
        moe_router_topk=2,
        moe_router_topk_scaling_factor=2.5,
        dsa_indexer_n_heads=4,
        dsa_indexer_head_dim=32,
        dsa_indexer_topk=32,
        dsa_indexer_topk_freq=2,
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_loss_coeff=1.0,
        dsa_indexer_use_sparse_loss=True,
    )
    return MLATransformerConfig(**fields)


PRESETS: dict[str, Callable[[], MLATransformerConfig]] = {
    "tiny-glm5": tiny_glm5,
    "glm-5": glm_5,
    "glm-5.2": glm_5_2,
    "deepseek-v3.2": deepseek_v3_2,
}


def get_preset(name: str) -> MLATransformerConfig:
    """A fresh configuration of the preset ``name``.

    Raises:
        ValueError: no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}: choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]()
