"""SwiGLU against its formula."""

from __future__ import annotations

import torch

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from tests.unit_tests.core.tiny_model import tiny_config

PARTS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def test_mlp_is_swiglu_with_the_gate_first() -> None:
    mlp = MLP(tiny_config(params_dtype=torch.float64), PARTS)
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == {
        "linear_fc1.weight": (2, 24, 32),
        "linear_fc2.weight": (32, 24),
    }
    x = torch.randn(7, 32, dtype=torch.float64)
    gate, up = x @ mlp.linear_fc1.weight[0].T, x @ mlp.linear_fc1.weight[1].T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ mlp.linear_fc2.weight.T
    torch.testing.assert_close(mlp(x), expected)
    swapped = (up / (1 + torch.exp(-up)) * gate) @ mlp.linear_fc2.weight.T
    assert not torch.allclose(expected, swapped)


def test_a_given_width_replaces_the_configurations() -> None:
    assert MLP(tiny_config(), PARTS, ffn_hidden_size=10).linear_fc2.weight.shape == (32, 10)
