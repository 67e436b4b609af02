"""Weights depend on the seed and on their own name alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.models.gpt import GPTModel, build_gpt_model
from megatron.core.tensor_parallel import init_method_normal, initialize_weights, scaled_init_method_normal
from tests.unit_tests.core.tiny_model import tiny_config


def build(seed: int, **overrides: object) -> GPTModel:
    torch.manual_seed(seed)
    return build_gpt_model(tiny_config(**overrides))


def test_standard_deviations() -> None:
    tensor = torch.empty(100_000)
    assert init_method_normal(0.3)(tensor).std().item() == pytest.approx(0.3, rel=0.02)
    assert scaled_init_method_normal(0.3, 8)(tensor).std().item() == pytest.approx(0.3 / 4, rel=0.02)


def test_every_weight_of_the_model_has_megatrons_distribution() -> None:
    model = build(1, init_method_std=0.5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == (0 if name.endswith("bias") else 1)).all()), name
            continue
        into_residual = any(part in name for part in ("linear_proj.", "linear_fc2."))
        std = 0.5 / 6**0.5 if into_residual else 0.5
        count = parameter.numel()
        assert parameter.std().item() == pytest.approx(std, rel=6 / (2 * count) ** 0.5), name
        assert abs(parameter.mean().item()) < 6 * std / count**0.5, name


def test_one_seed_one_model_another_seed_another() -> None:
    first, again, other = build(1).state_dict(), build(1).state_dict(), build(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, p in build(1).named_parameters() if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    values = [tuple(first[name].flatten()[:4].tolist()) for name in drawn]
    assert len(set(values)) == len(values), "two parameters drew the same numbers"


def test_other_modules_move_no_weight() -> None:
    few = build(1).state_dict()
    for more in (build(1, dsa_indexer_topk_freq=1), build(1, moe_shared_expert_intermediate_size=None)):
        common = few.keys() & more.state_dict().keys()
        assert "decoder.layers.2.mlp.router.weight" in common
        assert all(torch.equal(few[name], more.state_dict()[name]) for name in common)


def test_the_global_stream_is_left_alone() -> None:
    model = build(1)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialize_weights(model, seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_from_the_meta_device_gets_the_same_weights() -> None:
    torch.manual_seed(1)
    model = build_gpt_model(tiny_config(), device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, 7)
    initialize_weights(model, seed=1)
    expected = build(1)
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in expected.named_parameters())
    assert all(torch.equal(b, dict(model.named_buffers())[n]) for n, b in expected.named_buffers())
