"""Rounding at the scoring boundary and the Hadamard rotation. FP8 has a file of its own, ``test_quantization``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.precision import (
    compute_dtype,
    hadamard_rotate,
    to_scoring_precision,
)
from megatron.core.transformer.experimental_attention_variant.dsa.reference import score

from . import oracle
from .helpers import draw, indexer_operands, with_grad


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_the_rotation_is_sylvesters_matrix(width: int) -> None:
    x = draw(3, 2, width, seed=1)
    np.testing.assert_allclose(hadamard_rotate(x).numpy(), x.numpy() @ oracle.hadamard(width), rtol=0, atol=1e-12)


def test_rotating_twice_gives_the_input_back() -> None:
    x = draw(3, 128, seed=1)
    torch.testing.assert_close(hadamard_rotate(hadamard_rotate(x)), x)
    one = torch.zeros(128, dtype=torch.float64)
    one[5] = 1
    assert hadamard_rotate(one).abs().eq(128**-0.5).all()


def test_the_rotation_of_bf16_is_rounded_once() -> None:
    x = draw(50, 64, seed=1, dtype=torch.bfloat16)
    rotated = hadamard_rotate(x)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, hadamard_rotate(x.float()).bfloat16())
    exact = x.double() @ torch.from_numpy(oracle.hadamard(64))
    assert ((rotated.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-6).all()


def test_the_rotation_passes_gradients_through_its_transpose() -> None:
    (x,) = with_grad(draw(4, 8, seed=1))
    assert torch.autograd.gradcheck(hadamard_rotate, x)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="got 12 channels, but needs a power of two: change the head width"):
        hadamard_rotate(draw(2, 12, seed=1))


def test_the_rotation_changes_no_score_but_what_is_rounded() -> None:
    """In exact arithmetic scores stay; in BF16 they agree to BF16, and an outlier channel rounds differently."""
    indexer = indexer_operands(Layout.causal(1, 40))
    indexer.k_SD[:, 3] *= 100
    rotated = IndexerInputs(hadamard_rotate(indexer.q_TID), hadamard_rotate(indexer.k_SD), indexer.w_TI)
    exact = score(indexer)
    torch.testing.assert_close(score(rotated), exact, rtol=1e-10, atol=1e-10)
    plain, turned = (score(to_scoring_precision(operands, "bf16")) for operands in (indexer, rotated))
    assert not torch.equal(plain, turned)
    # Each operand is off by at most 2^-9 of itself, so a head's product by 2^-8 of the two norms.
    norms_TIS = indexer.q_TID.norm(dim=-1)[..., None] * indexer.k_SD.norm(dim=-1)
    bound_TS = torch.einsum("ti,tis->ts", indexer.w_TI.abs(), norms_TIS) * 2**-8 * 1.01
    assert ((plain - exact).abs() <= bound_TS).all() and ((turned - exact).abs() <= bound_TS).all()


def test_arithmetic_is_fp32_or_wider() -> None:
    for given, used in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert compute_dtype(torch.zeros(1, dtype=given)) == used


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rounding_happens_once_and_spares_the_head_weights(dtype: torch.dtype) -> None:
    indexer = indexer_operands(Layout.causal(1, 9), dtype=dtype)
    leaves = with_grad(indexer.q_TID, indexer.k_SD)
    rounded = to_scoring_precision(IndexerInputs(*leaves, indexer.w_TI), "bf16")
    assert isinstance(rounded, IndexerInputs) and rounded.w_TI is indexer.w_TI
    for made, given in ((rounded.q_TID, leaves[0]), (rounded.k_SD, leaves[1])):
        assert made.dtype == dtype and torch.equal(made, given.bfloat16().to(dtype))
        made.backward(torch.full_like(made, 1 + 2**-7))
        assert given.grad is not None and given.grad.eq(1 + 2**-7).all()  # straight through, in the carrier's type


def test_fp32_scoring_rounds_nothing_and_keeps_fp64() -> None:
    indexer = indexer_operands(Layout.causal(1, 9))
    assert to_scoring_precision(indexer, "fp32") is indexer and score(indexer).dtype == torch.float64


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8' is unknown: use 'bf16', 'fp8' or 'fp32'"):
        to_scoring_precision(indexer_operands(Layout.causal(1, 2)), "int8")
