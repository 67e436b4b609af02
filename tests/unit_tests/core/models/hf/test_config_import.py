"""config.json -> MLATransformerConfig: transformers' config classes are the judge of defaults and aliases."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from megatron.core.models.hf.config_import import config_from_hf
from tests.unit_tests.core.models.hf.golden import NAMES, hf_config

CLASSES = {"glm_moe_dsa": GlmMoeDsaConfig, "deepseek_v32": DeepseekV32Config}


def assert_same_model(config: Any, theirs: Any) -> None:
    """Field by field, against a transformers config object."""
    assert config.num_layers == theirs.num_hidden_layers
    assert config.vocab_size == theirs.vocab_size
    assert config.hidden_size == theirs.hidden_size
    assert config.ffn_hidden_size == theirs.intermediate_size
    assert config.num_attention_heads == theirs.num_attention_heads
    assert (config.q_lora_rank, config.kv_lora_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert config.qk_head_dim == theirs.qk_nope_head_dim
    assert config.qk_pos_emb_head_dim == theirs.qk_rope_head_dim
    assert config.v_head_dim == theirs.v_head_dim
    assert config.layernorm_epsilon == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.init_method_std == theirs.initializer_range
    assert config.untie_embeddings_and_output_weights is not theirs.tie_word_embeddings
    assert [config.is_moe_layer(n + 1) for n in range(config.num_layers)] == [
        kind == "sparse" for kind in theirs.mlp_layer_types
    ]
    assert config.num_moe_experts == theirs.n_routed_experts
    assert config.moe_ffn_hidden_size == theirs.moe_intermediate_size
    assert config.moe_shared_expert_intermediate_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert config.moe_router_topk == theirs.num_experts_per_tok
    assert (config.moe_router_num_groups or 1) == theirs.n_group
    assert (config.moe_router_group_topk or 1) == theirs.topk_group
    assert config.norm_topk_prob is theirs.norm_topk_prob
    assert config.moe_router_topk_scaling_factor == theirs.routed_scaling_factor
    assert config.dsa_indexer_n_heads == theirs.index_n_heads
    assert config.dsa_indexer_head_dim == theirs.index_head_dim
    assert config.dsa_indexer_topk == theirs.index_topk
    words = getattr(theirs, "indexer_types", ["full"] * config.num_layers)
    assert [config.dsa_config().computes_topk(n + 1) for n in range(config.num_layers)] == [w == "full" for w in words]


@pytest.mark.parametrize("name", NAMES)
def test_golden_configs(name: str) -> None:
    hf = hf_config(name)
    config = config_from_hf(hf)
    assert_same_model(config, CLASSES[hf["model_type"]](**hf))
    assert config.dsa_indexer_rope_interleaved is (hf["model_type"] == "glm_moe_dsa")


@pytest.mark.parametrize("model_type", CLASSES)
def test_absent_keys_take_the_class_defaults(model_type: str) -> None:
    assert_same_model(config_from_hf({"model_type": model_type}), CLASSES[model_type]())


@pytest.mark.parametrize("alias", ["num_local_experts", "num_experts"])
def test_expert_count_aliases(alias: str) -> None:
    hf = {"model_type": "glm_moe_dsa", alias: 16}
    assert config_from_hf(hf).num_moe_experts == GlmMoeDsaConfig(**hf).n_routed_experts == 16


def test_what_the_classes_fix_in_code() -> None:
    config = config_from_hf(hf_config("a_glm_plain"))
    assert config.layernorm_epsilon == 1e-5
    assert config.attention_latent_norm_epsilon == config.dsa_indexer_k_norm_epsilon == 1e-6
    assert config.dsa_indexer_scoring_relu and not config.dsa_indexer_rotate_activation
    assert not config.dsa_indexer_k_norm_fp32 and not config.dsa_indexer_rope_fp32
    assert config.mla_rotary_interleaved and not config.add_bias_linear
    assert config.moe_router_score_function == "sigmoid" and config.moe_router_enable_expert_bias


def test_stray_head_dims_are_ignored_as_transformers_does() -> None:
    hf = hf_config("a_glm_plain") | {"head_dim": 999, "qk_head_dim": 999}
    assert config_from_hf(hf) == config_from_hf(hf_config("a_glm_plain"))


def test_overrides_win() -> None:
    config = config_from_hf(
        hf_config("a_glm_plain"),
        attention_latent_norm_epsilon=1e-5,
        dsa_indexer_loss_coeff=0.5,
        params_dtype=torch.bfloat16,
        num_moe_experts=4,
    )
    assert (config.attention_latent_norm_epsilon, config.dsa_indexer_loss_coeff) == (1e-5, 0.5)
    assert config.params_dtype == torch.bfloat16 and config.bf16
    assert config.num_moe_experts == 4


def test_dense_models_have_no_experts() -> None:
    config = config_from_hf({"model_type": "glm_moe_dsa", "num_hidden_layers": 2})
    assert config.num_moe_experts is None
    assert not config.is_moe_layer(1)


IRREGULAR = ["full", "shared", "full", "full", "shared", "shared"]


def test_irregular_schedule_is_refused_with_the_remedy_and_the_remedy_works() -> None:
    hf = hf_config("b_glm_indexshare") | {"indexer_types": IRREGULAR}
    with pytest.raises(ValueError, match=r"indexer_types is irregular.*dsa_indexer_topk_freq=\[1, 0, 1, 1, 0, 0\]"):
        config_from_hf(hf)
    config = config_from_hf(hf, dsa_indexer_topk_freq=[1, 0, 1, 1, 0, 0])
    assert [config.dsa_config().computes_topk(n) for n in range(1, 7)] == [w == "full" for w in IRREGULAR]


def _numbers(freq: int, offset: int) -> dict[str, int]:
    return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}


OTHER_OWNERS: list[dict[str, Any]] = [{"dsa_indexer_topk_freq": freq} for freq in ([1] * 6, [1, 0, 0, 1, 0, 0], 1, 2)]
OTHER_OWNERS += [_numbers(3, 1), {"dsa_indexer_skip_topk_offset": 4}]


@pytest.mark.parametrize("override", OTHER_OWNERS, ids=str)
def test_schedule_override_cannot_change_who_owns_an_indexer(override: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gives other layers an indexer .* \[1, 1, 0, 0, 1, 0\]"):
        config_from_hf(hf_config("b_glm_indexshare"), **override)


@pytest.mark.parametrize("keys", [{}, {"index_topk_freq": 1}], ids=["no keys", "frequency 1"])
def test_an_indexer_in_every_layer_may_be_respelled_but_not_thinned_out(keys: dict[str, int]) -> None:
    hf = {"model_type": "deepseek_v32"} | keys
    for override in ({"dsa_indexer_topk_freq": [1] * 61}, _numbers(1, 0), {}):
        assert all(map(config_from_hf(hf, **override).dsa_config().computes_topk, range(1, 62)))
    with pytest.raises(ValueError, match=r"freq=4 with dsa_indexer_skip_topk_offset=3 gives other layers an indexer"):
        config_from_hf(hf, **_numbers(4, 3))


def test_schedule_override_may_respell_it() -> None:
    for override in ({"dsa_indexer_topk_freq": [1, 1, 0, 0, 1, 0]}, _numbers(3, 2)):
        config = config_from_hf(hf_config("b_glm_indexshare"), **override)
        assert [config.dsa_config().computes_topk(n) for n in range(1, 7)] == [1, 1, 0, 0, 1, 0]


REFUSED = {
    "model_type 'llama' cannot be read: supported are glm_moe_dsa, deepseek_v32": {"model_type": "llama"},
    "model_type 'None'": {"model_type": None},
    "attention_bias=True": {"attention_bias": True},
    "mlp_bias=True": {"mlp_bias": True},
    "attention_dropout=0.1": {"attention_dropout": 0.1},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "num_key_value_heads=2 .* only 4": {"num_key_value_heads": 2},
    "scoring_func='softmax'": {"scoring_func": "softmax"},
    "topk_method='greedy'": {"topk_method": "greedy"},
    "moe_layer_freq=2": {"moe_layer_freq": 2},
    "rope_interleave=False": {"rope_interleave": False},
    "indexer_rope_interleave=False .* only True is supported for glm_moe_dsa": {"indexer_rope_interleave": False},
    "indexer_rope_interleave=True .* only False is supported for deepseek_v32": {
        "model_type": "deepseek_v32",
        "indexer_rope_interleave": True,
        "indexer_types": None,
    },
    "deepseek_v32 has an indexer in every layer": {
        "model_type": "deepseek_v32",
        "indexer_types": ["full", "shared", "shared", "shared"],
    },
    "layer_types contains \\['sliding_attention'\\]": {"layer_types": ["sliding_attention"] * 4},
    "mlp_layer_types has 3 entries for 4 layers": {"mlp_layer_types": ["dense"] * 3},
    "unknown words \\['moe'\\]": {"mlp_layer_types": ["dense", "moe", "moe", "moe"]},
    "n_shared_experts=0": {"n_shared_experts": 0},
    "q_lora_rank is null": {"q_lora_rank": None},
    "n_group is null": {"n_group": None},
    "truncate: false": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "truncate": False}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_key(message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        config_from_hf(hf_config("a_glm_plain") | REFUSED[message])
    assert str(refusal.value).rstrip().endswith(".") and "\n" not in str(refusal.value)


WRONG_TYPES = {
    "hidden_size is '64' in config.json, but it must be an integer": {"hidden_size": "64"},
    "hidden_size is \\[64\\] in config.json, but it must be an integer": {"hidden_size": [64]},
    "hidden_size is null": {"hidden_size": None},
    "num_attention_heads is null": {"num_attention_heads": None},
    "num_hidden_layers is 4.0 in": {"num_hidden_layers": 4.0},
    "num_hidden_layers is True in": {"num_hidden_layers": True},
    "kv_lora_rank is {} in": {"kv_lora_rank": {}},
    "num_experts_per_tok is '2' in": {"num_experts_per_tok": "2"},
    "first_k_dense_replace is '1' in": {"first_k_dense_replace": "1", "mlp_layer_types": None},
    "index_topk_freq is 'x' in": {"index_topk_freq": "x", "indexer_types": None},
    "rms_norm_eps is '1e-5' in config.json, but it must be a finite number": {"rms_norm_eps": "1e-5"},
    "routed_scaling_factor is \\[\\] in": {"routed_scaling_factor": []},
    "rope_parameters.original_max_position_embeddings is inf in": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": float("inf")}
    },
    "rms_norm_eps is 1000.* in config.json, but it must be a finite number": {"rms_norm_eps": 10**400},
    "initializer_range is nan in": {"initializer_range": float("nan")},
    "tie_word_embeddings is 'false' in config.json, but it must be true or false": {"tie_word_embeddings": "false"},
    "norm_topk_prob is null in config.json, but it must be true or false": {"norm_topk_prob": None},
    "mlp_layer_types is 3 in config.json, but it must be a list of texts": {"mlp_layer_types": 3},
    "layer_types is \\[\\[\\]\\] in config.json, but it must be a list of texts": {"layer_types": [[]]},
    "indexer_types is 7 in config.json, but it must be a text or a list of texts": {"indexer_types": 7},
    "rope_parameters is \\[1\\] in config.json, but it must be an object in braces": {"rope_parameters": [1]},
    "rope_parameters.rope_theta is '1e4' in config.json": {"rope_parameters": {"rope_theta": "1e4"}},
    "rope_scaling.factor is \\[4\\] in config.json": {"rope_scaling": {"type": "yarn", "factor": [4]}},
    "rope_parameters.rope_type is 5 in config.json, but it must be a text": {"rope_parameters": {"rope_type": 5}},
    "quantization_config is 'fp8' in config.json": {"quantization_config": "fp8"},
    "num_nextn_predict_layers is '1' in config.json": {"num_nextn_predict_layers": "1"},
    "qk_rope_head_dim=0 in config.json cannot be expressed: glm_moe_dsa rotates": {"qk_rope_head_dim": 0},
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_values_of_another_type_are_refused_with_key_value_and_type(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        config_from_hf(hf_config("a_glm_plain") | WRONG_TYPES[message])
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("checkpoint", NAMES)
def test_every_key_that_is_read_has_a_type(checkpoint: str) -> None:
    """A wrong value in any key of a real config.json, one at a time, is a sentence or has no effect."""
    hf = hf_config(checkpoint)
    for name, value in hf.items():
        for wrong in ("x", [["x"]], {"x": 1}, -1.5, None):
            if type(wrong) is not type(value):
                try:
                    config_from_hf(hf | {name: wrong})
                except ValueError as error:
                    assert str(error).endswith(".") and name in str(error), (name, wrong)


def test_flags_that_agree_with_the_model_type_are_accepted() -> None:
    agreeing = {
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    assert config_from_hf(hf_config("a_glm_plain") | agreeing) == config_from_hf(hf_config("a_glm_plain"))
    hf = hf_config("c_v32_yarn") | {"indexer_rope_interleave": False, "index_topk_freq": 1, "topk_method": "noaux_tc"}
    assert config_from_hf(hf) == config_from_hf(hf_config("c_v32_yarn"))
