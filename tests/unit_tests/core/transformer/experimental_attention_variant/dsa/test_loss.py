"""How side losses are scaled, logged and attached to an output."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker
from megatron.core.transformer.experimental_attention_variant.dsa.loss import attach_loss

from .helpers import draw, with_grad


def test_the_scale_divides_by_the_normalizer_or_by_the_rows() -> None:
    assert LossTracker().scale(21) == 1 / 21
    assert LossTracker(normalizer=84.0).scale(21) == 1 / 84
    assert LossTracker(normalizer=84.0, grad_scale=2.0).scale(21) == 2 / 84
    assert LossTracker(grad_scale=torch.tensor(1024.0)).scale(4).item() == 256
    assert LossTracker().scale(0) == 1.0  # nothing but padding: the sum is 0, and dividing by 0 would make it NaN


@pytest.mark.parametrize("normalizer", [0.0, -1.0])
def test_a_normalizer_that_cannot_divide_is_refused(normalizer: float) -> None:
    with pytest.raises(ValueError, match="normalizer is .*: give a positive one"):
        LossTracker(normalizer=normalizer)


def test_what_is_logged_is_detached_and_counts_once() -> None:
    losses, (value,) = LossTracker(), with_grad(torch.tensor(3.0))
    for _ in range(2):
        losses.record(4, value * 2, rows=7)
    assert losses.kl_sums[4] == 6.0 and not losses.kl_sums[4].requires_grad and losses.rows == {4: 7}


def test_attaching_changes_no_output_and_adds_the_losses_gradient() -> None:
    output, weight = with_grad(draw(3, 4, seed=1), draw(5, seed=2))
    attached = attach_loss(output, weight.square().sum())
    assert torch.equal(attached, output)
    (attached * 7).sum().backward()
    assert output.grad is not None and output.grad.eq(7).all()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())  # factor 1, whatever multiplies the output


def test_an_output_without_gradients_carries_the_loss_too() -> None:
    output, (weight,) = draw(3, 4, seed=1), with_grad(draw(5, seed=2))
    (attach_loss(output, weight.sum()).sum() * 0.0).backward()
    assert weight.grad is not None and weight.grad.eq(1).all() and not output.requires_grad


def test_losses_of_several_layers_add_up() -> None:
    (weight,) = with_grad(draw(5, seed=2))
    x = draw(3, seed=1)
    for factor in (1.0, 10.0, 100.0):
        x = attach_loss(x * 2, weight.sum() * factor).sin()
    x.sum().backward()
    assert weight.grad is not None and weight.grad.eq(111).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_back_propagates_the_loss_once(reentrant: bool) -> None:
    x, weight = with_grad(draw(3, seed=1), draw(5, seed=2))
    checkpoint(lambda y: attach_loss(y, weight.square().sum()), x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())
