"""Linear layers and the embedding, whole, against plain products and look-ups; split ones: test_parallel_layers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.unit_tests.core.tiny_model import tiny_config

LAYERS = [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear]


@pytest.mark.parametrize("layer_class", LAYERS)
def test_a_linear_layer_is_a_product(layer_class: Any) -> None:
    layer = layer_class(5, 3, config=tiny_config())
    assert layer.weight.shape == (3, 5) and layer.bias is None
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(layer(x), torch.einsum("...i,oi->...o", x, layer.weight))


def test_bias_starts_at_zero_and_is_added() -> None:
    layer = ColumnParallelLinear(5, 3, config=tiny_config(), bias=True)
    assert layer.bias is not None and torch.equal(layer.bias, torch.zeros(3))
    with torch.no_grad():
        layer.bias.copy_(torch.arange(3.0))
    torch.testing.assert_close(layer(torch.zeros(2, 5)), torch.arange(3.0).expand(2, 3))


def test_stacked_projections_follow_each_other() -> None:
    layer = ColumnParallelLinear(5, 3, config=tiny_config(), num_stacked=2, bias=True)
    assert layer.weight.shape == (2, 3, 5)
    x = torch.randn(7, 5)
    torch.testing.assert_close(layer(x), torch.cat((x @ layer.weight[0].T, x @ layer.weight[1].T), dim=1))


def test_weights_have_the_models_type_and_the_given_initialization() -> None:
    def ones(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(1.0)

    config = tiny_config(params_dtype=torch.bfloat16)
    for module in (
        ReplicatedLinear(5, 3, config=config, init_method=ones),
        VocabParallelEmbedding(7, 3, config=config, init_method=ones),
    ):
        assert module.weight.dtype == torch.bfloat16 and bool((module.weight == 1).all())


def test_embedding_looks_up_and_repeated_tokens_add_their_gradients() -> None:
    embedding = VocabParallelEmbedding(7, 3, config=tiny_config())
    ids = torch.tensor([[1, 4], [4, 4]])
    out = embedding(ids)
    assert torch.equal(out[0, 1], embedding.weight[4])
    out.sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:, 0].tolist() == [0, 1, 0, 0, 3, 0, 0]
