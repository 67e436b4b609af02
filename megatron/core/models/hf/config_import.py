"""config.json of a Hugging Face checkpoint -> MLATransformerConfig.

What the classes of transformers 5.24.0 compute is the meaning of a field: a key that they ignore (``head_dim``) is
ignored, one that they hard-code (the latent norms' epsilon) is written out, and one that says something else than the
model type computes is refused, never guessed. Training-only options (indexer loss, kernel backend, parallel sizes)
have no counterpart and come as overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.models.hf.index_share import read_schedule, schedule_of, to_frequency
from megatron.core.models.hf.json_types import check_types
from megatron.core.models.hf.model_types import INDEXER_K_NORM_EPSILON, LATENT_NORM_EPSILON, MODEL_TYPES, ModelType
from megatron.core.models.hf.rope import read_rope
from megatron.core.transformer.transformer_config import MLATransformerConfig

# Hugging Face name -> our name, where nothing but the name differs.
_RENAMED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "max_position_embeddings": "max_position_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}

_FIXED = {
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "mla_rotary_interleaved": True,
    "attention_latent_norm_epsilon": LATENT_NORM_EPSILON,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": INDEXER_K_NORM_EPSILON,
    "dsa_indexer_k_norm_fp32": False,
    "dsa_indexer_rope_fp32": False,
}

# Keys that a config.json may carry as long as they say what the model computes anyway: (supported value, why).
_REQUIRED_VALUES = {
    "attention_bias": (False, "DSA has no linear biases"),
    "mlp_bias": (False, "DSA has no linear biases"),
    "attention_dropout": (0, "this package trains without dropout"),
    "hidden_act": ("silu", "the MLPs are SwiGLU"),
    "scoring_func": ("sigmoid", "both model types score experts with a sigmoid"),
    "topk_method": ("noaux_tc", "both model types choose experts by score plus correction bias"),
    "moe_layer_freq": (1, "mlp_layer_types or first_k_dense_replace says which layers have experts"),
    "rope_interleave": (True, "the main rotary embedding pairs neighbours in both model types"),
}


def config_from_hf(hf: Mapping[str, Any], **overrides: Any) -> MLATransformerConfig:
    """The model configuration of a config.json.

    Args:
        hf: the parsed config.json.
        **overrides: fields of MLATransformerConfig that replace what the file says (training options, precision, an
            explicit ``dsa_indexer_topk_freq`` list for an irregular schedule).

    Raises:
        ValueError: one sentence naming the key that came, what is supported, and what to change.
    """
    kind = _model_type(hf)
    check_types(hf)
    values = dict(kind.defaults) | dict(hf)
    for alias in ("num_local_experts", "num_experts"):
        if hf.get(alias) is not None:
            values["n_routed_experts"] = hf[alias]
    fields: dict[str, Any] = dict(_FIXED)
    fields |= {ours: _present(values, theirs) for theirs, ours in _RENAMED.items()}
    _check_values(values, kind)
    fields["untie_embeddings_and_output_weights"] = not values["tie_word_embeddings"]
    fields["dsa_indexer_rope_interleaved"] = kind.indexer_rope_interleave
    fields |= read_rope(hf, fields["max_position_embeddings"])
    fields |= _read_moe(values, fields["num_layers"])
    schedule = _read_index_share(hf, kind, fields["num_layers"])
    if "dsa_indexer_topk_freq" not in overrides:
        fields |= _frequency(schedule)
    fields["bf16"] = overrides.get("params_dtype") == torch.bfloat16
    config = MLATransformerConfig(**fields | overrides)
    _check_schedule(config, schedule)
    return config


def _model_type(hf: Mapping[str, Any]) -> ModelType:
    name = str(hf.get("model_type"))
    if name not in MODEL_TYPES:
        raise ValueError(
            f"model_type {name!r} cannot be read: supported are {', '.join(MODEL_TYPES)}; convert the checkpoint to "
            "one of them."
        )
    return MODEL_TYPES[name]


def _present(values: Mapping[str, Any], name: str) -> Any:
    if values[name] is None:
        raise ValueError(f"{name} is null in config.json, but the model cannot be built without it: give its value.")
    return values[name]


def _check_values(values: Mapping[str, Any], kind: ModelType) -> None:
    required = dict(_REQUIRED_VALUES)
    interleave = kind.indexer_rope_interleave
    required["indexer_rope_interleave"] = (interleave, f"{kind.name} computes that, and transformers ignores the key")
    required["num_key_value_heads"] = (values["num_attention_heads"], "MLA has one key/value head a query head")
    for name, (supported, why) in required.items():
        if values.get(name) is not None and values[name] != supported:
            raise ValueError(
                f"{name}={values[name]!r} in config.json cannot be expressed: only {supported!r} is supported for "
                f"{kind.name} ({why}); correct config.json if the weights were trained so."
            )
    if values["qk_rope_head_dim"] == 0:
        raise ValueError(
            f"qk_rope_head_dim=0 in config.json cannot be expressed: {kind.name} rotates a part of its heads."
        )
    unknown = sorted(set(values.get("layer_types") or ()) - {"indexed_attention"})
    if unknown:
        raise ValueError(
            f"layer_types contains {unknown}, but every layer of {kind.name} is sparse here: only "
            "'indexed_attention' is supported."
        )


def _read_moe(values: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    pattern = _moe_pattern(values, num_layers)
    if not any(pattern):
        return {"num_moe_experts": None}
    if not values["n_shared_experts"]:
        raise ValueError(
            f"n_shared_experts={values['n_shared_experts']!r}: the Hugging Face classes always build a shared expert, "
            "so at least 1 is supported."
        )
    groups = _present(values, "n_group")
    return {
        "num_moe_experts": _present(values, "n_routed_experts"),
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": _present(values, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": values["n_shared_experts"] * values["moe_intermediate_size"],
        "moe_router_topk": _present(values, "num_experts_per_tok"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": None if groups == 1 else groups,
        "moe_router_group_topk": None if groups == 1 else _present(values, "topk_group"),
        "moe_router_topk_scaling_factor": float(_present(values, "routed_scaling_factor")),
        "norm_topk_prob": bool(values["norm_topk_prob"]),
    }


def _moe_pattern(values: Mapping[str, Any], num_layers: int) -> list[int]:
    words = values.get("mlp_layer_types")
    if words is None:
        dense = min(_present(values, "first_k_dense_replace"), num_layers)
        return [0] * dense + [1] * (num_layers - dense)
    unknown = sorted({str(word) for word in words} - {"dense", "sparse"})
    if unknown or len(words) != num_layers:
        raise ValueError(
            f"mlp_layer_types has {len(words)} entries for {num_layers} layers and unknown words {unknown}: give one "
            'entry a layer, each "dense" or "sparse".'
        )
    return [int(word == "sparse") for word in words]


def _read_index_share(hf: Mapping[str, Any], kind: ModelType, num_layers: int) -> list[bool]:
    """Which layers own an indexer, one entry a layer."""
    keys = ("indexer_types", "index_topk_pattern", "index_topk_freq")
    if not kind.shares_index and all(hf.get(key) is None for key in keys):
        return [True] * num_layers
    schedule = read_schedule(hf, num_layers)
    if not kind.shares_index and not all(schedule):
        raise ValueError(
            f"config.json makes some layers reuse selected keys, but {kind.name} has an indexer in every layer: "
            "remove the index sharing keys, or use model_type glm_moe_dsa."
        )
    return schedule


def _frequency(schedule: list[bool]) -> dict[str, int]:
    rule = to_frequency(schedule)
    if rule is None:
        raise ValueError(
            "indexer_types is irregular: no dsa_indexer_topk_freq and dsa_indexer_skip_topk_offset reproduce it; "
            f"pass the override dsa_indexer_topk_freq={_numbers(schedule)} to use it as an explicit list."
        )
    return {"dsa_indexer_topk_freq": rule[0], "dsa_indexer_skip_topk_offset": rule[1]}


def _check_schedule(config: MLATransformerConfig, schedule: list[bool]) -> None:
    """A schedule decides which layers own indexer weights, so overrides may respell it but not change it."""
    if schedule_of(config) != schedule[: config.num_layers]:
        raise ValueError(
            f"dsa_indexer_topk_freq={config.dsa_indexer_topk_freq!r} with dsa_indexer_skip_topk_offset="
            f"{config.dsa_indexer_skip_topk_offset} gives other layers an indexer than the checkpoint, whose per-layer "
            f"list is {_numbers(schedule)}: override dsa_indexer_topk_freq by that list, or neither of the two."
        )


def _numbers(schedule: list[bool]) -> list[int]:
    return [int(selects) for selects in schedule]
