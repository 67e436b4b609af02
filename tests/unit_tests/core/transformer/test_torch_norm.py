"""RMSNorm against its formula, and its order of roundings against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from megatron.core.transformer.torch_norm import RMSNorm
from tests.unit_tests.core.tiny_model import tiny_config


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_bf16_rounds_where_transformers_rounds(eps: float) -> None:
    ours = RMSNorm(tiny_config(params_dtype=torch.bfloat16), 64, eps=eps)
    theirs = GlmMoeDsaRMSNorm(64, eps=eps).bfloat16()
    with torch.no_grad():
        ours.weight.uniform_(0.2, 5.0)
        theirs.weight.copy_(ours.weight)
    x = torch.randn(200, 64).bfloat16() * 1e-2
    assert torch.equal(ours(x), theirs(x))


def test_epsilon_is_added_to_the_mean_square() -> None:
    x = torch.randn(5, 8, dtype=torch.float64) * 1e-3
    norm = RMSNorm(tiny_config(layernorm_epsilon=1e-5, params_dtype=torch.float64), 8)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected)
    other = RMSNorm(tiny_config(layernorm_epsilon=1e-5, params_dtype=torch.float64), 8, eps=1e-6)
    assert bool(((other(x) / norm(x)) > 1.1).all())


def test_arithmetic_is_fp32_in_bf16_models() -> None:
    norm = RMSNorm(tiny_config(params_dtype=torch.bfloat16), 1024)
    x = torch.full((1, 1024), 1.0) + torch.arange(1024) * 2**-7
    wide = RMSNorm(tiny_config(), 1024)(x.bfloat16().float())
    assert torch.equal(norm(x.bfloat16()), wide.bfloat16())


def test_weight_stored_as_offset_from_one() -> None:
    plain = RMSNorm(tiny_config(params_dtype=torch.float64), 8)
    config = tiny_config(experimental_attention_variant=None, layernorm_zero_centered_gamma=True)
    offset = RMSNorm(config, 8).double()
    assert bool((offset.weight == 0).all())
    with torch.no_grad():
        plain.weight.uniform_(0.2, 5.0)
        offset.weight.copy_(plain.weight - 1)
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(offset(x), plain(x))


def test_gradients_by_finite_differences() -> None:
    norm = RMSNorm(tiny_config(params_dtype=torch.float64), 5)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight))
