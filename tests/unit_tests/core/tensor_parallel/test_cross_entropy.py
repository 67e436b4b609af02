"""The chunked loss equals the whole one, in value and gradient, and keeps one chunk of logits at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.cross_entropy import (
    chunked_cross_entropy,
    rows_in_budget,
    vocab_parallel_cross_entropy,
)


def test_loss_is_the_negative_log_probability_in_fp32() -> None:
    logits = torch.randn(5, 11).bfloat16()
    target = torch.tensor([0, 10, 3, -100, 7])
    loss = vocab_parallel_cross_entropy(logits, target)
    log_probability = torch.log(logits.double().exp() / logits.double().exp().sum(1, keepdim=True))
    expected = -log_probability.gather(1, target.clamp(min=0)[:, None])[:, 0] * (target >= 0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_chunks_change_nothing(rows: int) -> None:
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    target, row_weight = torch.randint(0, 11, (7,)), torch.rand(7, dtype=torch.float64)
    whole = vocab_parallel_cross_entropy(F.linear(hidden, weight), target)
    expected = torch.autograd.grad((whole * row_weight).sum(), (hidden, weight))
    loss = chunked_cross_entropy(hidden, target, lambda h: F.linear(h, weight), rows)
    actual = torch.autograd.grad((loss * row_weight).sum(), (hidden, weight))
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("rows", "calls", "keeps"), [(2, 8, False), (8, 1, True)], ids=["chunks", "whole"])
def test_only_a_whole_batch_keeps_its_logits(rows: int, calls: int, keeps: bool) -> None:
    kept: list[torch.Size] = []
    made: list[int] = []

    def logits_of(hidden: Tensor) -> Tensor:
        made.append(len(hidden))
        return F.linear(hidden, weight)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    hidden, weight = torch.randn(8, 3, requires_grad=True), torch.randn(11, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = chunked_cross_entropy(hidden, torch.zeros(8, dtype=torch.int64), logits_of, rows).sum()
    assert any(shape[-1:] == (11,) for shape in kept) == keeps
    loss.backward()
    assert made == [rows] * calls


def test_budget_counts_fp32_logits() -> None:
    assert rows_in_budget(1000, budget=40_000) == 10
    assert rows_in_budget(1000, budget=1) == 1
