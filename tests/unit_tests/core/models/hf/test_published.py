"""Presets against the published configurations, as their config.json say them."""

from dataclasses import fields
from typing import Any

import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from megatron.core.models.gpt import get_preset
from megatron.core.models.hf import config_from_hf, config_to_hf

GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM_5_2 = GLM_5 | {
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}

DEEPSEEK_V3_2: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

PUBLISHED = {"glm-5": GLM_5, "glm-5.2": GLM_5_2, "deepseek-v3.2": DEEPSEEK_V3_2}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_is_the_import_of_the_published_config(name: str) -> None:
    imported, preset = config_from_hf(PUBLISHED[name]), get_preset(name)
    different = {
        field.name: (getattr(imported, field.name), getattr(preset, field.name))
        for field in fields(imported)
        if getattr(imported, field.name) != getattr(preset, field.name)
    }
    assert different == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_exports_what_was_published(name: str) -> None:
    """Every field of transformers' config class but the storage type."""
    kind = DeepseekV32Config if name == "deepseek-v3.2" else GlmMoeDsaConfig
    written, published = (kind(**hf).to_dict() for hf in (config_to_hf(get_preset(name)), PUBLISHED[name]))
    published["rope_parameters"].pop("type", None)  # the older name of rope_type, which transformers keeps beside it
    names = kind().to_dict().keys() - {"dtype"}
    assert len(names) > 40
    assert {key: written[key] for key in names} == {key: published[key] for key in names}


@pytest.mark.parametrize(
    ("name", "layers", "selecting"), [("glm-5", 78, 78), ("glm-5.2", 78, 21), ("deepseek-v3.2", 61, 61)]
)
def test_who_selects(name: str, layers: int, selecting: int) -> None:
    dsa = config_from_hf(PUBLISHED[name]).dsa_config()
    owners = [dsa.computes_topk(number) for number in range(1, layers + 1)]
    assert (len(owners), sum(owners)) == (layers, selecting)
    moe = [get_preset(name).is_moe_layer(number) for number in range(1, layers + 1)]
    assert moe == [False] * 3 + [True] * (layers - 3)
