"""A small model for the tests of this folder."""

import dataclasses

import torch

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig

CONFIG = MLATransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=48,
    vocab_size=50,
    make_vocab_size_divisible_by=1,
    gated_linear_unit=True,
    activation_func="silu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    rope_type="rope",
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=4,
    dsa_indexer_topk_freq=[1, 0],
    dsa_indexer_loss_coeff=1.0,
    dsa_indexer_use_sparse_loss=True,
    num_moe_experts=4,
    moe_layer_freq=[0, 1],
    moe_ffn_hidden_size=16,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


def build(seed: int = 0, **options: object) -> GPTModel:
    """A model with FP32 parameters."""
    torch.manual_seed(seed)
    return build_gpt_model(dataclasses.replace(CONFIG, **options))
