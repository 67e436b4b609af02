"""The balance loss against its formula, document by document, and its scale against microbatch splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt import build_gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, LossTracker
from megatron.core.transformer.moe.load_balancing import sequence_balance_loss, valid_row_ids
from tests.unit_tests.core.tiny_model import assert_same_gradients, gradients, tiny_config


def balance_loss_of_document(scores_TE: Tensor, topk: int) -> Tensor:
    rows, experts = scores_TE.shape
    total = scores_TE.new_zeros(())
    for e in range(experts):
        chosen = sum(int(e in row.topk(topk).indices.tolist()) for row in scores_TE)
        mean_share = sum(row[e] / row.sum() for row in scores_TE) / rows
        total = total + experts / (topk * rows) * chosen * mean_share
    return total


LAYOUTS = {
    "batch": Layout.causal(3, 5),
    "packed": Layout.packed((0, 4, 5, 11)),
    "empty-document": Layout.packed((0, 4, 4, 7)),
    "padded": Layout.packed((0, 3, 7), padded_offsets=(0, 6, 12)),
    "zigzag": Layout.zigzag((0, 8, 14), 2, 1, padded_offsets=(0, 8, 16)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_equals_the_formula_per_document(name: str) -> None:
    layout = LAYOUTS[name]
    scores_TE = torch.rand(layout.num_valid_rows, 6, dtype=torch.float64, requires_grad=True)
    rows_of_document: dict[int, list[int]] = {}
    next_row = 0
    for segment in layout.segments:
        rows_of_document.setdefault(segment.key_start, []).extend(range(next_row, next_row + segment.num_rows))
        next_row += segment.num_rows
    expected = sum(len(rows) * balance_loss_of_document(scores_TE[rows], topk=2) for rows in rows_of_document.values())
    assert isinstance(expected, Tensor)
    actual = sequence_balance_loss(scores_TE, 2, layout)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, scores_TE), torch.autograd.grad(expected, scores_TE))


def test_an_even_load_gives_one_per_row_and_a_collapsed_one_more() -> None:
    scores_TE = torch.full((8, 4), 0.1).scatter_(1, torch.arange(8)[:, None] % 4, 0.9)
    assert sequence_balance_loss(scores_TE, 1, Layout.causal(1, 8)).item() == pytest.approx(8.0)
    scores_TE = torch.full((8, 4), 0.1).scatter_(1, torch.zeros(8, 1, dtype=torch.int64), 0.9)
    assert sequence_balance_loss(scores_TE, 1, Layout.causal(1, 8)).item() == pytest.approx(8 * 4 * 0.75)


def test_no_valid_rows_give_zero() -> None:
    layout = Layout.packed((0, 0), padded_offsets=(0, 4))
    assert valid_row_ids(layout, torch.device("cpu")).shape == (0,)
    assert sequence_balance_loss(torch.zeros(0, 4), 2, layout) == 0


def test_row_ids_that_an_evaluation_made_can_be_saved_for_backward() -> None:
    layout = Layout.packed((0, 2, 7), padded_offsets=(0, 4, 9))  # no other test's: views are kept
    with torch.inference_mode():
        valid_row_ids(layout, torch.device("cpu"))
    x = torch.ones(9, requires_grad=True)
    (x[valid_row_ids(layout, torch.device("cpu"))] ** 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 0, 0, 2, 2, 2, 2, 2]


BALANCED: dict[str, Any] = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.3)


def side_gradients(
    tokens: Tensor, splits: int, scale: float = 1.0, normalizer: float | None = None
) -> dict[str, Tensor]:
    """Gradients of the balance loss alone: the main loss is multiplied by zero."""
    torch.manual_seed(0)
    model = build_gpt_model(tiny_config(dsa_indexer_loss_coeff=None, dsa_indexer_use_sparse_loss=False, **BALANCED))
    for part in tokens.chunk(splits):
        losses = LossTracker(normalizer, scale)
        (model.train()(part, losses=losses) * 0.0).sum().backward()
        assert sorted(losses.balance_sums) == [2, 3]
    return gradients(model)


def test_gradients_do_not_depend_on_the_split_into_microbatches() -> None:
    tokens = torch.randint(0, 61, (8, 6))
    whole = side_gradients(tokens, 1, normalizer=48)
    assert whole["decoder.layers.1.mlp.router.weight"].abs().max() > 0
    for splits in (2, 8):
        assert_same_gradients(side_gradients(tokens, splits, normalizer=48), whole, atol=1e-7, rtol=1e-4)


def test_gradients_follow_the_main_losss_scale() -> None:
    tokens = torch.randint(0, 61, (2, 6))
    plain, scaled = side_gradients(tokens, 1), side_gradients(tokens, 1, scale=1024.0)
    assert_same_gradients({name: g / 1024 for name, g in scaled.items()}, plain, atol=1e-8, rtol=1e-5)
    # The default normalizer is the rows of the microbatch.
    assert_same_gradients(side_gradients(tokens, 1, normalizer=12), plain, atol=1e-8, rtol=1e-5)


def test_the_loss_is_off_without_a_coefficient_and_in_evaluation() -> None:
    tokens = torch.randint(0, 61, (2, 6))
    for overrides, train in (({"moe_aux_loss_coeff": 0.0}, True), ({}, False)):
        model = build_gpt_model(tiny_config(**(BALANCED | overrides))).train(train)
        losses = LossTracker()
        model(tokens, losses=losses)
        assert losses.balance_sums == {}


def test_padding_takes_no_part() -> None:
    torch.manual_seed(0)
    model = build_gpt_model(tiny_config(**BALANCED)).train()
    tokens = torch.randint(0, 61, (1, 7))
    sums, found = [], []
    for packed, padded in (
        (PackedSeqParams.from_offsets((0, 3, 7)), tokens),
        (
            PackedSeqParams.from_offsets((0, 3, 7), (0, 5, 12)),
            torch.cat((tokens[:, :3], torch.full((1, 2), 9), tokens[:, 3:], torch.full((1, 3), 5)), dim=1),
        ),
    ):
        losses = LossTracker()
        model.zero_grad()
        (model(padded, packed_seq_params=packed, losses=losses) * 0.0).sum().backward()
        sums.append(torch.stack(list(losses.balance_sums.values())))
        found.append(gradients(model))
    torch.testing.assert_close(sums[0], sums[1])
    assert_same_gradients(found[1], found[0], atol=1e-7, rtol=1e-4)
