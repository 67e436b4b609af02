"""Every gate of the model configuration that is not DSA's, and the values that follow from others."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.transformer import transformer_config as config_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

VALID: dict[str, Any] = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    gated_linear_unit=True,
    activation_func="silu",
    vocab_size=100,
)
EXPERTS: dict[str, Any] = dict(num_moe_experts=8, moe_router_topk=3)

# What is wrong, and pieces of the sentence: the option, its value, the remedy.
GATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no vocabulary": ({"vocab_size": None}, ("vocab_size is unset", "set it")),
    "no layers": ({"num_layers": 0}, ("num_layers is 0", "positive number")),
    "negative width": ({"hidden_size": -8}, ("hidden_size is -8", "positive number")),
    "no attention heads": ({"num_attention_heads": 0}, ("num_attention_heads is 0", "positive number")),
    "negative MLP": ({"ffn_hidden_size": -3}, ("ffn_hidden_size is -3", "positive number")),
    "padding to a multiple of 0": (
        {"make_vocab_size_divisible_by": 0},
        ("make_vocab_size_divisible_by is 0", "positive number"),
    ),
    "norm epsilon that is no number": (
        {"layernorm_epsilon": float("nan")},
        ("layernorm_epsilon is nan", "finite number"),
    ),
    "infinite rotary base": ({"rotary_base": float("inf")}, ("rotary_base is inf", "finite number")),
    "negative deviation": ({"init_method_std": -1.0}, ("init_method_std is -1.0", "0 or a positive number")),
    "YaRN without a factor": ({"rotary_scaling_factor": 0.0}, ("rotary_scaling_factor is 0.0", "positive number")),
    "YaRN of no rotations": ({"beta_fast": 0.0}, ("beta_fast is 0.0", "positive number")),
    "residual dropout": ({"hidden_dropout": 0.1}, ("hidden_dropout=0.1", "without dropout", "set both to 0")),
    "attention dropout": ({"attention_dropout": 0.2}, ("attention_dropout=0.2", "set both to 0")),
    "ungated MLP": ({"gated_linear_unit": False}, ("gated_linear_unit=False", "--swiglu")),
    "another activation": ({"activation_func": "gelu"}, ("activation_func='gelu'", "--swiglu")),
    "more experts a token than there are": (
        EXPERTS | {"moe_router_topk": 9},
        ("moe_router_topk=9", "num_moe_experts=8", "lower it"),
    ),
    "no experts": (EXPERTS | {"num_moe_experts": 0}, ("num_moe_experts is 0", "positive number")),
    "no experts a token": (EXPERTS | {"moe_router_topk": 0}, ("moe_router_topk is 0", "positive number")),
    "experts without width": (EXPERTS | {"moe_ffn_hidden_size": 0}, ("moe_ffn_hidden_size is 0", "positive number")),
    "coefficient of no balancing loss": (
        EXPERTS | {"moe_aux_loss_coeff": 0.01},
        ("moe_aux_loss_coeff=0.01", "moe_router_load_balancing_type='none'", "'seq_aux_loss', or the coefficient to 0"),
    ),
    "overlap without shared experts": (
        EXPERTS | {"moe_shared_expert_overlap": True},
        ("moe_shared_expert_overlap=True", "moe_shared_expert_intermediate_size is None", "drop the overlap"),
    ),
    "overlap without experts": (
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 8},
        ("moe_shared_expert_overlap=True", "num_moe_experts is None", "set both"),
    ),
    "MoE list of other numbers": (
        EXPERTS | {"moe_layer_freq": [0, 1, 2]},
        ("moe_layer_freq=[0, 1, 2]", "other than 0 (dense) and 1 (MoE)"),
    ),
    "MoE list too short": (EXPERTS | {"moe_layer_freq": [0, 1]}, ("2 entries for 3 layers", "give one a layer")),
    "MoE interval of 0": (EXPERTS | {"moe_layer_freq": 0}, ("moe_layer_freq=0", "use 1 or more")),
    "groups without a number to keep": (
        EXPERTS | {"moe_router_num_groups": 4},
        ("moe_router_num_groups=4", "moe_router_group_topk=None", "set both"),
    ),
    "groups that do not divide": (
        EXPERTS | {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
        ("8 experts", "moe_router_num_groups=3", "must divide"),
    ),
    "no groups": (
        EXPERTS | {"moe_router_num_groups": 0, "moe_router_group_topk": 0},
        ("moe_router_num_groups=0", "must divide"),
    ),
    "groups of one expert": (
        EXPERTS | {"moe_router_num_groups": 8, "moe_router_group_topk": 4},
        ("moe_router_num_groups=8", "hold at least 2 each"),
    ),
    "more groups kept than there are": (
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 5},
        ("moe_router_group_topk=5", "no more than all"),
    ),
    "kept groups too small": (
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
        ("1 groups kept hold 2 experts", "moe_router_topk=3", "keep more groups"),
    ),
    "no latent": ({"kv_lora_rank": 0}, ("kv_lora_rank is 0", "positive number")),
    "no plain part of a head": ({"qk_head_dim": 0}, ("qk_head_dim is 0", "positive number")),
    "negative rotary part": (
        {"qk_pos_emb_head_dim": -2},
        ("qk_pos_emb_head_dim=-2 is negative or odd", "make it even"),
    ),
    "no values": ({"v_head_dim": -1}, ("v_head_dim is -1", "positive number")),
    "odd rotary part": ({"qk_pos_emb_head_dim": 5}, ("qk_pos_emb_head_dim=5 is negative or odd", "make it even")),
    "no query latent": ({"q_lora_rank": None}, ("q_lora_rank=None", "positive rank")),
    "latents without norms": ({"qk_layernorm": False}, ("qk_layernorm=False", "qk_layernorm to True")),
}


def build(overrides: dict[str, Any]) -> MLATransformerConfig:
    """A configuration, asked for the one value that is checked when it is read."""
    config = MLATransformerConfig(**(VALID | overrides))
    assert config.padded_vocab_size % config.make_vocab_size_divisible_by == 0
    return config


@pytest.mark.parametrize("name", GATES)
def test_the_model_configuration_refuses(name: str) -> None:
    overrides, pieces = GATES[name]
    with pytest.raises(ValueError) as caught:
        build(overrides)
    message = str(caught.value)
    assert [piece for piece in pieces if piece not in message] == [], message
    assert message.endswith(".") and "\n" not in message and "  " not in message


def test_the_table_covers_every_gate() -> None:
    source = Path(config_module.__file__).read_text(encoding="utf-8")
    gates = {node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)}
    reached = set()
    for overrides, _ in GATES.values():
        try:
            build(overrides)
        except ValueError as error:
            reached.add(traceback.extract_tb(error.__traceback__)[-1].lineno)
    assert reached == gates


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        EXPERTS,
        EXPERTS | {"moe_layer_freq": [0, 1, 1]},
        EXPERTS | {"moe_layer_freq": 3, "moe_router_topk": 8},
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 4},
        {"activation_func": torch.nn.functional.silu, "qk_pos_emb_head_dim": 2},
    ],
)
def test_what_is_supported_passes(overrides: dict[str, Any]) -> None:
    build(overrides)


def test_values_follow_from_others() -> None:
    config = build(EXPERTS)
    assert config.ffn_hidden_size == config.moe_ffn_hidden_size == 4 * 32
    assert config.padded_vocab_size == 128 and build({"vocab_size": 128}).padded_vocab_size == 128
    assert build({"vocab_size": 129, "make_vocab_size_divisible_by": 10}).padded_vocab_size == 130
    assert build({"bf16": True}).params_dtype == torch.bfloat16


def test_which_layers_have_experts() -> None:
    def moe(freq: int | list[int]) -> list[bool]:
        return [build(EXPERTS | {"moe_layer_freq": freq}).is_moe_layer(number) for number in (1, 2, 3)]

    assert moe(1) == [True, True, True]
    assert moe(2) == [True, False, True]
    assert moe([0, 1, 1]) == [False, True, True]
    assert not build({}).is_moe_layer(1)
