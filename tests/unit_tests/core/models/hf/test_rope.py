"""Rotary settings against what transformers' own code computes from the same rope_parameters."""

import math

import pytest
from transformers import DeepseekV32Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_apply_mscale

from megatron.core.models.common.embeddings.rope_utils import build_rotary_embedding, softmax_scale
from megatron.core.models.hf.config_export import config_to_hf
from megatron.core.models.hf.config_import import config_from_hf
from megatron.core.models.hf.rope import read_rope
from tests.unit_tests.core.models.hf.golden import torch_positions

BASE = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
YARN = {
    "both-mscales": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "unequal-mscales": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "no-mscale": {"factor": 8.0},
    "mscale-ignored": {"factor": 8.0, "mscale": 0.5},
    "only-all-dim": {"factor": 8.0, "mscale_all_dim": 0.8},
    "zero-mscale": {"factor": 8.0, "mscale": 0.0, "mscale_all_dim": 0.8},
    "attention-factor": {"factor": 8.0, "attention_factor": 1.7},
    "attention-factor-and-all-dim": {"factor": 8.0, "attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 1.2},
    "betas": {"factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    "factor-1": {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "theta": {"factor": 40.0, "rope_theta": 5e5},
}


def hf_config(rope: dict) -> dict:
    return {"model_type": "deepseek_v32", "max_position_embeddings": 512, "rope_parameters": rope}


@pytest.mark.parametrize("name", YARN)
def test_yarn_means_the_same_as_in_transformers(name: str) -> None:
    rope = BASE | YARN[name]
    theirs = DeepseekV32Config(**hf_config(dict(rope)))
    inv_freq, table_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    scale = yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5)

    for config in (config_from_hf(hf_config(rope)), config_from_hf(config_to_hf(config_from_hf(hf_config(rope))))):
        positions = torch_positions(9)
        cos, sin = build_rotary_embedding(config)(positions, inv_freq.dtype)
        angles = positions[:, None] * inv_freq
        assert (cos - angles.cos() * table_factor).abs().max() < 1e-5
        assert (sin - angles.sin() * table_factor).abs().max() < 1e-5
        assert math.isclose(softmax_scale(config), scale, rel_tol=1e-12)


def test_cases_can_tell_the_factors_apart() -> None:
    settings = {
        (r["mscale"], r["mscale_all_dim"]) for r in (read_rope(hf_config(BASE | y), 512) for y in YARN.values())
    }
    assert len(settings) >= 6


def test_plain_rope_does_not_scale_the_softmax() -> None:
    config = config_from_hf(hf_config({"rope_type": "default", "rope_theta": 500.0}))
    assert (config.rope_type, config.rotary_base, config.mscale_all_dim) == ("rope", 500.0, 0.0)
    assert math.isclose(softmax_scale(config), 192**-0.5)


def test_absent_settings_are_plain_rope_with_the_class_default() -> None:
    config = config_from_hf({"model_type": "deepseek_v32"})
    theirs = DeepseekV32Config().rope_parameters
    assert (config.rope_type, theirs["rope_type"]) == ("rope", "default")
    assert config.rotary_base == theirs["rope_theta"] == 1e4


def test_legacy_spelling_is_the_same() -> None:
    yarn = {
        key: value for key, value in (BASE | YARN["both-mscales"]).items() if key not in ("rope_type", "rope_theta")
    }
    legacy = {"rope_theta": 3e4, "rope_scaling": {"type": "yarn", **yarn}}
    modern = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 3e4, **yarn}}
    assert read_rope(legacy, 512) == read_rope(modern, 512)
    assert read_rope({"rope_theta": 3e4, "rope_scaling": None}, 512)["rotary_base"] == 3e4


def test_null_factor_is_the_ratio_of_the_lengths() -> None:
    assert read_rope(hf_config(BASE | {"factor": None}), 512)["rotary_scaling_factor"] == 8.0


REFUSED = {
    "truncate: false": BASE | {"factor": 8.0, "truncate": False},
    "rope_type 'llama3'": {"rope_type": "llama3"},
    "partial_rotary_factor": BASE | {"factor": 8.0, "partial_rotary_factor": 0.5},
    "original_max_position_embeddings": {"rope_type": "yarn", "factor": 8.0},
    "attention_factor=2.0": BASE | {"factor": 1.0, "attention_factor": 2.0},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_no_field_expresses_is_refused_by_name(named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_rope(hf_config(REFUSED[named]), 512)
