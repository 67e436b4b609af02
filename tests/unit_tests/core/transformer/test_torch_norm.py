"""RMSNorm against its formula and its order of roundings."""

from __future__ import annotations

import torch

from megatron.core.transformer.torch_norm import RMSNorm
from tests.unit_tests.core.tiny_model import tiny_config


def test_bf16_is_normed_rounded_and_then_weighted() -> None:
    norm = RMSNorm(tiny_config(params_dtype=torch.bfloat16), 64, eps=1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.2, 5.0)
    x = torch.randn(200, 64).bfloat16() * 1e-2
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), norm.weight * normed.bfloat16())
    assert not torch.equal(norm(x), (norm.weight.float() * normed).bfloat16())


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
