"""Specs follow the configuration, and refuse what no layer of the package is."""

from __future__ import annotations

import pytest

from megatron.core.models.gpt import get_gpt_decoder_block_spec
from megatron.core.transformer.dense_latent_attention import DenseLatentAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.core.tiny_model import tiny_config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"moe_layer_freq": [0, 1, 0, 1]}, [MLP, MoELayer, MLP, MoELayer]),
        ({"moe_layer_freq": 3}, [MoELayer, MLP, MLP, MoELayer]),
        ({"moe_layer_freq": 1}, [MoELayer] * 4),
        ({"num_moe_experts": None}, [MLP] * 4),
    ],
    ids=["list", "every-third", "all", "none"],
)
def test_feed_forward_parts_follow_the_frequency(overrides: dict[str, object], expected: list[type]) -> None:
    spec = get_gpt_decoder_block_spec(tiny_config(num_layers=4, **overrides))
    assert [layer.submodules.mlp.module for layer in spec.layer_specs] == expected


@pytest.mark.parametrize("variant", ["dsa", None])
def test_the_core_attention_follows_the_variant(variant: str | None) -> None:
    spec = get_gpt_decoder_block_spec(tiny_config(experimental_attention_variant=variant))
    core = spec.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert getattr(core, "module", core) is (DSAttention if variant else DenseLatentAttention)


def test_attention_without_latents_is_refused() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, gated_linear_unit=True, activation_func="silu"
    )
    with pytest.raises(ValueError, match="multi_latent_attention is False.*use MLATransformerConfig"):
        get_gpt_decoder_block_spec(config)


def test_biases_are_refused() -> None:
    config = tiny_config(experimental_attention_variant=None, add_bias_linear=True)
    with pytest.raises(ValueError, match="add_bias_linear is True.*set it to False"):
        get_gpt_decoder_block_spec(config)
