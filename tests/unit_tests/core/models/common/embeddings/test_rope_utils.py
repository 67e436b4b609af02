"""Rotary tables and rotation, against complex arithmetic in FP64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.common.embeddings import (
    apply_rotary_pos_emb,
    build_rotary_embedding,
    softmax_scale,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

POSITIONS = torch.tensor([0, 1, 7, 4097, 131071])


def make_config(**overrides: Any) -> MLATransformerConfig:
    fields: dict[str, Any] = dict(num_layers=1, hidden_size=8, num_attention_heads=2, qk_head_dim=12)
    fields |= dict(qk_pos_emb_head_dim=6, gated_linear_unit=True, activation_func="silu", add_bias_linear=False)
    return MLATransformerConfig(**(fields | overrides))


def rotate_by_complex_numbers(x: torch.Tensor, angles_TP: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = x.shape[-1] // 2
    index = torch.arange(2 * half).view(half, 2) if interleaved else torch.arange(2 * half).view(2, half).T
    turned = torch.complex(x[..., index[:, 0]], x[..., index[:, 1]])
    turned = turned * torch.polar(torch.ones_like(angles_TP), angles_TP).view(len(x), *[1] * (x.dim() - 2), half)
    out = torch.empty_like(x)
    out[..., index[:, 0]], out[..., index[:, 1]] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("middle", [(), (3,), (2, 3)], ids=["one-head", "heads", "two-dims"])
def test_rotation_is_complex_multiplication(interleaved: bool, middle: tuple[int, ...]) -> None:
    rotary = build_rotary_embedding(make_config(rope_type="rope", rotary_base=500.0))
    x = torch.randn(5, *middle, 6, dtype=torch.float64)
    angles_TP = POSITIONS.double()[:, None] * 500.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    expected = rotate_by_complex_numbers(x, angles_TP, interleaved)
    actual = apply_rotary_pos_emb(x, *rotary(POSITIONS, torch.float64), interleaved)
    # The tables are FP32: an angle of 131,071 rad is known to 2^-8.
    torch.testing.assert_close(actual[:4], expected[:4], atol=2e-3, rtol=0)
    torch.testing.assert_close(actual[4:], expected[4:], atol=3e-2, rtol=0)
    torch.testing.assert_close(actual[:3], expected[:3], atol=2e-6, rtol=0)


def test_tables_are_fp32_rounded_once() -> None:
    rotary = build_rotary_embedding(make_config(rope_type="rope"))
    exact = rotary(POSITIONS, torch.float32)
    for table, rounded in zip(exact, rotary(POSITIONS, torch.bfloat16), strict=True):
        assert table.dtype == torch.float32 and rounded.dtype == torch.bfloat16
        assert torch.equal(table.bfloat16(), rounded)
    # Positions in BF16 would put 4097 on 4096.
    assert not torch.equal(exact[0][3], rotary(torch.tensor([4096]), torch.float32)[0][0])


def test_casting_the_module_changes_no_table() -> None:
    rotary = build_rotary_embedding(make_config(rope_type="rope"))
    before = rotary(POSITIONS, torch.float32)
    after = rotary.to(torch.bfloat16)(POSITIONS, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not list(rotary.parameters()) and not list(rotary.buffers())


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = build_rotary_embedding(make_config(qk_pos_emb_head_dim=64, rope_type="rope")).frequencies()
    stretched = build_rotary_embedding(make_config(qk_pos_emb_head_dim=64)).frequencies()
    assert stretched[0] == plain[0]
    torch.testing.assert_close(stretched[-1], plain[-1] / 40)
    ratio = plain / stretched
    assert bool((ratio.diff() >= -1e-5).all())


def test_softmax_scale() -> None:
    magnitude = 0.1 * 1.3 * math.log(40) + 1
    assert softmax_scale(make_config(mscale_all_dim=1.3)) == pytest.approx(18**-0.5 * magnitude**2)
    assert softmax_scale(make_config(mscale_all_dim=0.0)) == pytest.approx(18**-0.5)
    assert softmax_scale(make_config(mscale_all_dim=1.3, rope_type="rope")) == pytest.approx(18**-0.5)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_bf16_inputs_round_where_the_tables_say(interleaved: bool) -> None:
    rotary = build_rotary_embedding(make_config(qk_pos_emb_head_dim=64, rope_type="rope"))
    x = torch.randn(5, 2, 64).bfloat16()
    wide, narrow = rotary(POSITIONS, torch.float32), rotary(POSITIONS, torch.bfloat16)
    once = apply_rotary_pos_emb(x, *wide, interleaved)
    assert once.dtype == torch.bfloat16
    assert torch.equal(once, apply_rotary_pos_emb(x.float(), *wide, interleaved).bfloat16())
    model = apply_rotary_pos_emb(x, *narrow, interleaved)
    assert model.dtype == torch.bfloat16 and not torch.equal(once, model)


def test_rotation_has_the_inverse_rotation_as_gradient() -> None:
    cos, sin = build_rotary_embedding(make_config(rope_type="rope"))(POSITIONS, torch.float64)
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    for interleaved in (True, False):
        torch.autograd.gradcheck(lambda x, i=interleaved: apply_rotary_pos_emb(x, cos, sin, i), (x,))


def test_unknown_rope_type_is_one_sentence() -> None:
    config = make_config()
    config.rope_type = "ntk"  # type: ignore[assignment]
    with pytest.raises(ValueError, match='rope_type=\'ntk\' was given, but "rope" and "yarn" are supported'):
        build_rotary_embedding(config)
