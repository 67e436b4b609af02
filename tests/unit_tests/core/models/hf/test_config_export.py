"""MLATransformerConfig -> config.json, read back by transformers' own classes and by our import."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from megatron.core.models.hf.config_export import config_to_hf, portability_notes
from megatron.core.models.hf.config_import import config_from_hf
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.unit_tests.core.models.hf.golden import NAMES, hf_config

CLASSES = {"glm_moe_dsa": GlmMoeDsaConfig, "deepseek_v32": DeepseekV32Config}
# What is computed, as transformers' config objects hold it; the rest names files and tokens.
IGNORED = {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "indexer_rope_interleave"}
ENGINE_KEYS = {"scoring_func", "topk_method", "moe_layer_freq", "index_topk_freq", "index_skip_topk_offset"}


def as_transformers_holds_it(hf: dict[str, Any]) -> dict[str, Any]:
    held = CLASSES[hf["model_type"]](**hf).to_dict()
    return {key: value for key, value in held.items() if key not in IGNORED | ENGINE_KEYS}


@pytest.mark.parametrize("name", NAMES)
def test_golden_configs_come_back(name: str) -> None:
    config = config_from_hf(hf_config(name))
    written = config_to_hf(config)
    assert as_transformers_holds_it(written) == as_transformers_holds_it(hf_config(name))
    assert config_from_hf(written) == config


@pytest.mark.parametrize("model_type", CLASSES)
def test_default_models_come_back(model_type: str) -> None:
    config = config_from_hf({"model_type": model_type})
    assert config_from_hf(config_to_hf(config)) == config
    written = as_transformers_holds_it(config_to_hf(config))
    assert written | {"dtype": None, "architectures": None} == as_transformers_holds_it({"model_type": model_type})


def trained_config(**changes: Any) -> MLATransformerConfig:
    """A configuration as the command line makes it, not one that was imported."""
    fields: dict[str, Any] = dict(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=48,
        vocab_size=100,
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        experimental_attention_variant="dsa",
        rope_type="rope",
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        num_moe_experts=4,
        moe_layer_freq=[0, 1, 1],
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=16,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=8,
        dsa_indexer_topk=4,
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_k_norm_epsilon=1e-6,
        attention_latent_norm_epsilon=1e-6,
    )
    return MLATransformerConfig(**fields | changes)


def test_what_engines_need_is_written() -> None:
    written = config_to_hf(trained_config(dsa_indexer_topk_freq=2, params_dtype=torch.bfloat16))
    expected = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "indexer_types": ["full", "shared", "full"],
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "indexer_rope_interleave": True,
        "n_shared_experts": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "vocab_size": 100,
    }
    assert {key: written.get(key) for key in expected} == expected
    held = GlmMoeDsaConfig(**written)
    assert (held.indexer_types, held.n_shared_experts) == (["full", "shared", "full"], 2)


def test_half_split_pairs_make_a_deepseek_model() -> None:
    written = config_to_hf(trained_config(dsa_indexer_rope_interleaved=False))
    assert (written["model_type"], written["architectures"]) == ("deepseek_v32", ["DeepseekV32ForCausalLM"])
    assert "indexer_types" not in written
    assert written["indexer_rope_interleave"] is False


def test_explicit_schedule_list_is_written() -> None:
    written = config_to_hf(trained_config(num_layers=3, dsa_indexer_topk_freq=[1, 0, 1]))
    assert written["indexer_types"] == ["full", "shared", "full"]
    assert "index_topk_freq" not in written


def test_dense_model_leaves_the_expert_keys_out() -> None:
    written = config_to_hf(trained_config(num_moe_experts=None))
    assert written["mlp_layer_types"] == ["dense"] * 3
    assert not {"n_routed_experts", "n_shared_experts", "moe_intermediate_size"} & written.keys()
    assert config_from_hf(written).num_moe_experts is None


REFUSED = {
    "experimental_attention_variant": {"experimental_attention_variant": None},
    "dsa_indexer_scoring_relu": {"dsa_indexer_scoring_relu": False},
    "mla_rotary_interleaved": {"mla_rotary_interleaved": False},
    "qk_pos_emb_head_dim=0 cannot be exported": {"qk_pos_emb_head_dim": 0},
    "dsa_indexer_topk_freq=2": {"dsa_indexer_topk_freq": 2, "dsa_indexer_rope_interleaved": False},
    "dsa_indexer_k_norm_epsilon=1e-05": {"dsa_indexer_k_norm_epsilon": None},
    "attention_latent_norm_epsilon=0.001": {"attention_latent_norm_epsilon": 1e-3},
    "moe_router_score_function='softmax'": {"moe_router_score_function": "softmax"},
    "moe_router_enable_expert_bias": {"moe_router_enable_expert_bias": False},
    "moe_shared_expert_intermediate_size=None": {"moe_shared_expert_intermediate_size": None},
    "moe_shared_expert_intermediate_size=12": {"moe_shared_expert_intermediate_size": 12},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_transformers_cannot_compute_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_to_hf(trained_config(**REFUSED[message]))


def test_notes_say_which_engines_agree_about_the_latent_norms() -> None:
    as_transformers = trained_config()
    (note,) = portability_notes(as_transformers)
    assert "1e-06, as transformers computes; vLLM, SGLang and Megatron-LM use 1e-05" in note
    (note,) = portability_notes(replace(as_transformers, attention_latent_norm_epsilon=None))
    assert "1e-05, as vLLM, SGLang and Megatron-LM use; transformers computes 1e-06" in note
    assert not portability_notes(replace(as_transformers, layernorm_epsilon=1e-6))


def test_note_on_dense_layers_after_moe_layers() -> None:
    notes = portability_notes(trained_config(moe_layer_freq=[1, 0, 1], layernorm_epsilon=1e-6))
    assert len(notes) == 1 and "mlp_layer_types" in notes[0]
