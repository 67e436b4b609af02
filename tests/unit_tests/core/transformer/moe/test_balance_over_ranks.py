"""The balance loss of documents whose rows lie on several ranks, against one process: its value and its gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_rows, group_rank, group_size, own_rows
from megatron.core.tensor_parallel.shards import sums_gradient_over_tp
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker
from megatron.core.transformer.experimental_attention_variant.dsa.layout import zigzag_key_order
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, TopKRouter
from tests.ranks import run_on_ranks
from tests.unit_tests.core.tiny_model import tiny_config

HIDDEN = 32
MODES: dict[str, ParallelSizes] = {
    "tp": ParallelSizes(2, tensor=2),
    "tp-sp": ParallelSizes(2, tensor=2),
    "cp": ParallelSizes(2, context=2),
    "tp-cp": ParallelSizes(4, tensor=2, context=2),
    "tp-sp-cp": ParallelSizes(4, tensor=2, context=2),
    "cp4": ParallelSizes(4, context=4),
}
# Real and padded offsets of the documents, or the batch and length of plain samples. Of the padded ones some are empty,
# and one is a single token, which the second of two context-parallel ranks does not see.
ROWS: dict[str, Any] = {
    "plain": (2, 8),
    "packed": ((0, 8, 24, 32), None),
    "padded": ((0, 1, 6, 6, 15, 15), (0, 8, 16, 24, 40, 48)),
}


def run(mode: str, rows: str, groups: ProcessGroupCollection) -> dict[str, Any]:
    """What one rank is left with: its share of the loss, and gradients of the loss and of the output, summed."""
    config = tiny_config(
        params_dtype=torch.float64,
        moe_shared_expert_intermediate_size=None,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.7,
        moe_router_bias_update_rate=0.0,
        sequence_parallel="sp" in mode,
        tensor_model_parallel_size=group_size(groups.tp),
        context_parallel_size=group_size(groups.cp),
        cp_comm_type="allgather",
    )
    torch.manual_seed(5)
    layer = MoELayer(config, MoESubmodules(TopKRouter, GroupedMLP), layer_number=2, pg_collection=groups)
    first, second = ROWS[rows]
    packed = None if rows == "plain" else PackedSeqParams.from_offsets(first, second)
    batch, length = (first, second) if packed is None else (1, (second or first)[-1])
    generator = torch.Generator().manual_seed(1)
    x, probe = (torch.randn(batch * length, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))

    cp = group_size(groups.cp)
    losses = LossTracker(normalizer=7.0)
    context = ForwardContext.build(batch, length // cp, packed, "cpu", losses, cp_group=groups.cp)
    held = torch.arange(len(x))
    if context.key_order is not None:
        held = context.key_order[1].chunk(cp)[group_rank(groups.cp)]
    if config.sequence_parallel:
        held = held[slice(*own_rows(len(held), groups.tp))]
    leaf = x[held].requires_grad_()
    (layer(leaf, context) * probe[held]).sum().backward()

    assert leaf.grad is not None and layer.router.weight.grad is not None
    weight, loss = layer.router.weight.grad, losses.balance_sums[2]
    for group in (groups.cp, groups.tp if sums_gradient_over_tp(layer.router.weight) else None):
        if group is not None:
            dist.all_reduce(weight, group=group)
    if groups.world is not None:
        dist.all_reduce(loss, group=groups.world)
    return {"loss": loss, "weight": weight, "dx": in_order(leaf.grad, held, groups, config.sequence_parallel)}


def in_order(grad: Tensor, held: Tensor, groups: ProcessGroupCollection, sequence_parallel: bool) -> Tensor:
    """All rows' gradients, in one process's order."""
    if sequence_parallel:
        grad, held = all_gather_rows(grad, groups.tp), all_gather_rows(held, groups.tp)
    grad, held = all_gather_rows(grad, groups.cp), all_gather_rows(held, groups.cp)
    return torch.empty_like(grad).index_copy_(0, held, grad)


def all_cases(world: int) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for mode, sizes in MODES.items():
        if sizes.world == world:
            groups = build_process_groups(sizes, "cpu")
            results |= {(mode, rows): run(mode, rows, groups) for rows in ROWS}
    return results


@cache
def on_ranks(world: int) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_on_ranks(world, all_cases, world)


@cache
def on_one(rows: str) -> dict[str, Any]:
    return run("", rows, ProcessGroupCollection())


def check_ranks_equal_one_process(mode: str, rows: str) -> None:
    wanted = on_one(rows)
    assert wanted["loss"] > 0
    for rank in on_ranks(MODES[mode].world):
        for name, value in wanted.items():
            torch.testing.assert_close(rank[mode, rows][name], value, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mode", [mode for mode, sizes in MODES.items() if sizes.world == 2])
def test_two_ranks_equal_one_process(mode: str, rows: str) -> None:
    check_ranks_equal_one_process(mode, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mode", [mode for mode, sizes in MODES.items() if sizes.world == 4])
def test_four_ranks_equal_one_process(mode: str, rows: str) -> None:
    check_ranks_equal_one_process(mode, rows)


def test_ranks_agree_on_the_order_of_keys() -> None:
    """The zigzag cases above put rows back by the order that the package itself gathers keys in."""
    order = zigzag_key_order((0, 8, 16), 2, "cpu")
    assert order is not None and order[1].tolist() == [0, 1, 6, 7, 8, 9, 14, 15, 2, 3, 4, 5, 10, 11, 12, 13]
