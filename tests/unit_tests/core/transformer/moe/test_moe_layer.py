"""The whole layer: shared experts, padding rows, and loads that are counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.tiny_model import context_of, tiny_config

PADDED = PackedSeqParams.from_offsets((0, 4, 4, 7), padded_offsets=(0, 6, 8, 12))
VALID = torch.tensor([0, 1, 2, 3, 8, 9, 10])


def make_layer(**overrides: object) -> MoELayer:
    config = tiny_config(**({"params_dtype": torch.float64} | overrides))
    spec = get_gpt_decoder_block_spec(config).layer_specs[1].submodules.mlp
    layer = build_module(spec, config=config, layer_number=2)
    assert isinstance(layer, MoELayer)
    return layer


def run(layer: MoELayer, x: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
    output = layer(x, context_of(1, len(x), packed))
    assert isinstance(output, Tensor)
    return output


def test_shared_experts_are_added_unscaled() -> None:
    layer = make_layer()
    x = torch.randn(9, 32, dtype=torch.float64)
    routed, _ = layer.experts(x, layer.router(x))
    assert layer.shared_experts is not None
    torch.testing.assert_close(run(layer, x), routed + layer.shared_experts(x))
    assert layer.shared_experts.linear_fc1.weight.shape == (2, 40, 32)


def test_no_width_no_shared_experts() -> None:
    layer = make_layer(moe_shared_expert_intermediate_size=None)
    assert layer.shared_experts is None
    assert {n.split(".")[0] for n, _ in layer.named_parameters()} == {"router", "experts"}


def test_padding_rows_go_nowhere() -> None:
    layer = make_layer().train()
    x = torch.randn(12, 32, dtype=torch.float64)
    x[torch.ones(12, dtype=torch.bool).scatter(0, VALID, False)] = torch.nan
    x.requires_grad_()
    context = context_of(packed=PADDED)
    output = layer(x, context)
    expected_x = x.detach()[VALID].requires_grad_()
    expected = run(layer, expected_x)
    assert torch.equal(output[VALID], expected)
    padding = output[torch.ones(12, dtype=torch.bool).scatter(0, VALID, False)]
    assert bool((padding == 0).all()), "NaN in padding must not reach the output"
    assert context.losses.expert_loads[2].sum() == len(VALID) * 2

    probe = torch.randn_like(output)
    inputs = list(layer.parameters())
    actual = torch.autograd.grad((output * probe).sum(), [x, *inputs])
    wanted = torch.autograd.grad((expected * probe[VALID]).sum(), [expected_x, *inputs])
    assert torch.equal(actual[0][VALID], wanted[0])
    assert actual[0].isnan().sum() == 0 and actual[0].abs().sum() == actual[0][VALID].abs().sum()
    torch.testing.assert_close(actual[1:], wanted[1:], atol=0, rtol=0)


def test_a_microbatch_of_padding_alone() -> None:
    layer = make_layer().train()
    context = context_of(packed=PackedSeqParams.from_offsets((0, 0), padded_offsets=(0, 4)))
    output = layer(torch.randn(4, 32, dtype=torch.float64, requires_grad=True), context)
    assert bool((output == 0).all()) and context.losses.expert_loads[2].sum() == 0
    output.sum().backward()
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in layer.parameters())


@pytest.mark.parametrize("train", [True, False])
def test_loads_are_counted_in_training_alone(train: bool) -> None:
    layer = make_layer().train(train)
    x = torch.randn(9, 32, dtype=torch.float64)
    context = context_of(1, 9)
    layer(x, context)
    expected = {2: layer.router(x).experts_TK.flatten().bincount(minlength=4).tolist()} if train else {}
    assert {n: load.tolist() for n, load in context.losses.expert_loads.items()} == expected
    with torch.no_grad():
        context = context_of(1, 9)
        layer(x, context)
    assert context.losses.expert_loads == {}
