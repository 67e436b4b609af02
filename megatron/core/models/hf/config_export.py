"""MLATransformerConfig -> config.json of a Hugging Face checkpoint, the inverse of ``config_import``.

The file must mean the same model to transformers 5.24.0, so a config whose numbers transformers cannot compute is
refused. Keys that only vLLM and SGLang read (``scoring_func``, ``topk_method``, ``moe_layer_freq``,
``indexer_rope_interleave``) are written too, because those engines assume something else in their absence.
Options that change rounding alone (Hadamard rotation, FP32 norms, scoring precision) have no key and leave no trace.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hf.index_share import schedule_of, to_words
from megatron.core.models.hf.model_types import DEEPSEEK, GLM, INDEXER_K_NORM_EPSILON, LATENT_NORM_EPSILON, ModelType
from megatron.core.models.hf.rope import write_rope
from megatron.core.transformer.transformer_config import MLATransformerConfig


def config_to_hf(config: MLATransformerConfig) -> dict[str, Any]:
    """The config.json of a model; ``model_type`` follows from the indexer's rotary pairs.

    Raises:
        ValueError: one sentence naming the option that transformers cannot compute, what it can, and what to change.
    """
    kind = GLM if config.dsa_indexer_rope_interleaved else DEEPSEEK
    _check_attention(config, kind)
    _check_norms(config)
    hf = {
        "architectures": [kind.architecture],
        "model_type": kind.name,
        "dtype": str(config.params_dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "qk_head_dim": config.qk_head_dim + config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.layernorm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "rope_parameters": write_rope(config),
        "index_n_heads": config.dsa_indexer_n_heads,
        "index_head_dim": config.dsa_indexer_head_dim,
        "index_topk": config.dsa_indexer_topk,
        "indexer_rope_interleave": kind.indexer_rope_interleave,
        "use_cache": True,
    }
    if config.max_position_embeddings is not None:
        hf["max_position_embeddings"] = config.max_position_embeddings
    return hf | _write_moe(config) | _write_index_share(config, kind)


def _refuse(option: str, value: object, supported: str, remedy: str) -> None:
    raise ValueError(f"{option}={value!r} cannot be exported: transformers computes {supported} only; {remedy}.")


def _check_attention(config: MLATransformerConfig, kind: ModelType) -> None:
    if config.experimental_attention_variant != "dsa":
        _refuse("experimental_attention_variant", config.experimental_attention_variant, "DSA", "export a DSA model")
    if not config.dsa_indexer_scoring_relu:
        _refuse("dsa_indexer_scoring_relu", False, "scores with the ReLU", "train with it")
    if not config.mla_rotary_interleaved:
        _refuse("mla_rotary_interleaved", False, "interleaved pairs", "train with them")
    if config.qk_pos_emb_head_dim == 0:
        _refuse("qk_pos_emb_head_dim", 0, "heads with a rotary part", "train with one")
    if config.layernorm_zero_centered_gamma:
        _refuse("layernorm_zero_centered_gamma", True, "plain norm weights", "train without it")
    if config.rope_type not in ("rope", "yarn"):
        _refuse("rope_type", config.rope_type, "rope and yarn", "train with one of them")
    if not kind.shares_index and not all(schedule_of(config)):
        _refuse(
            "dsa_indexer_topk_freq",
            config.dsa_indexer_topk_freq,
            "an indexer in every layer when rotary pairs are halves",
            "train with dsa_indexer_topk_freq=1 or dsa_indexer_rope_interleaved=True",
        )


def _check_norms(config: MLATransformerConfig) -> None:
    epsilon = config.dsa_indexer_k_norm_epsilon
    epsilon = config.layernorm_epsilon if epsilon is None else epsilon
    if epsilon != INDEXER_K_NORM_EPSILON:
        _refuse("dsa_indexer_k_norm_epsilon", epsilon, "1e-6", "train with dsa_indexer_k_norm_epsilon=1e-6")
    latent = _latent_norm_epsilon(config)
    if latent not in (LATENT_NORM_EPSILON, config.layernorm_epsilon):
        _refuse("attention_latent_norm_epsilon", latent, "1e-6 (other engines: rms_norm_eps)", "train with one of them")


def portability_notes(config: MLATransformerConfig) -> list[str]:
    """Sentences about what other engines compute differently from this model, for the user to see."""
    notes = []
    latent = _latent_norm_epsilon(config)
    if config.layernorm_epsilon != LATENT_NORM_EPSILON:
        theirs = "transformers computes" if latent == LATENT_NORM_EPSILON else "vLLM, SGLang and Megatron-LM use"
        others = "vLLM, SGLang and Megatron-LM use" if latent == LATENT_NORM_EPSILON else "transformers computes"
        other = config.layernorm_epsilon if latent == LATENT_NORM_EPSILON else LATENT_NORM_EPSILON
        notes.append(
            f"attention_latent_norm_epsilon is {latent:g}, as {theirs}; {others} {other:g} there, so override "
            f"attention_latent_norm_epsilon={other:g} to train for them."
        )
    pattern = [config.is_moe_layer(number) for number in range(1, config.num_layers + 1)]
    if True in pattern and not all(pattern[pattern.index(True) :]):
        notes.append("Dense layers follow MoE layers: transformers reads mlp_layer_types, vLLM and SGLang do not.")
    return notes


def _latent_norm_epsilon(config: MLATransformerConfig) -> float:
    latent = config.attention_latent_norm_epsilon
    return config.layernorm_epsilon if latent is None else latent


def _write_moe(config: MLATransformerConfig) -> dict[str, Any]:
    pattern = [config.is_moe_layer(number) for number in range(1, config.num_layers + 1)]
    dense = pattern.index(True) if any(pattern) else config.num_layers
    layers = {
        "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in pattern],
        "first_k_dense_replace": dense,
    }
    if not any(pattern):
        return layers
    _check_moe(config)
    assert config.moe_shared_expert_intermediate_size is not None and config.moe_ffn_hidden_size is not None
    return layers | {
        "moe_layer_freq": 1,
        "n_routed_experts": config.num_moe_experts,
        "n_shared_experts": config.moe_shared_expert_intermediate_size // config.moe_ffn_hidden_size,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _check_moe(config: MLATransformerConfig) -> None:
    shared, width = config.moe_shared_expert_intermediate_size, config.moe_ffn_hidden_size
    if not shared or not width or shared % width:
        _refuse(
            "moe_shared_expert_intermediate_size",
            shared,
            f"positive multiples of moe_ffn_hidden_size={width}",
            "train with one",
        )
    if config.moe_router_score_function != "sigmoid":
        _refuse("moe_router_score_function", config.moe_router_score_function, "sigmoid", "train with it")
    if not config.moe_router_enable_expert_bias:
        _refuse("moe_router_enable_expert_bias", False, "a router with the bias", "train with it")


def _write_index_share(config: MLATransformerConfig, kind: ModelType) -> dict[str, Any]:
    if not kind.shares_index:
        return {}
    written: dict[str, Any] = {"indexer_types": to_words(schedule_of(config))}
    if isinstance(config.dsa_indexer_topk_freq, int):
        written["index_topk_freq"] = config.dsa_indexer_topk_freq
        written["index_skip_topk_offset"] = max(config.dsa_indexer_skip_topk_offset, 1)
    return written
