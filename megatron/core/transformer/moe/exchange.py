"""Rows to the ranks that hold their experts, and back: the all-to-all of expert parallelism.

Rows arrive here sorted by expert, and experts lie in order over the ranks of the group, so what goes to one rank is one
run of rows. A rank receives its experts' rows source by source, and sorts them once more by expert.

How many rows come is decided by the routers of other ranks. A first, small all-to-all carries the counts, and reading
them is the one place inside a layer where the host waits for the device: the receive buffer needs a size. The sizes
also steer the three all-to-alls of rows (inputs, router weights, outputs) and their gradients.

Left out: a capacity (no token is dropped), and overlap of the exchange with shared experts.

Shape legend: N rows sent (a copy for each chosen expert), M rows received, E experts, L experts of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Exchange(NamedTuple):
    """One microbatch's exchange in one layer.

    Attributes:
        sent, received: rows to and from each rank of the group, on the host.
        group_ends_L: int32, end of each own expert's rows once they are sorted.
        order_M: received rows by own expert.
        inverse_M: where each received row went.
        group: the expert-parallel ranks.
    """

    sent: list[int]
    received: list[int]
    group_ends_L: Tensor
    order_M: Tensor
    inverse_M: Tensor
    group: ProcessGroup


@torch.no_grad()
def plan_exchange(load_E: Tensor, group: ProcessGroup) -> Exchange:
    """Agree on who sends how many rows; ``load_E`` counts this rank's rows by expert."""
    ranks = group.size()
    load_RL = load_E.view(ranks, -1)
    arriving_RL = torch.empty_like(load_RL)
    dist.all_to_all_single(arriving_RL, load_RL.contiguous(), group=group)
    sent, received = torch.stack((load_RL.sum(1), arriving_RL.sum(1))).tolist()
    experts = torch.arange(load_RL.shape[1], device=load_E.device).repeat(ranks)
    expert_M = experts.repeat_interleave(arriving_RL.flatten(), output_size=sum(received))
    order_M = expert_M.argsort(stable=True)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    group_ends_L = arriving_RL.sum(0).cumsum(0).to(torch.int32)
    return Exchange(sent, received, group_ends_L, order_M, inverse_M, group)


def send_to_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """Rows sorted by expert ``[N, ...]`` -> the rows of own experts, sorted by expert ``[M, ...]``."""
    arrived = _AllToAll.apply(rows, exchange.sent, exchange.received, exchange.group)
    return _permute(arrived, exchange.order_M, exchange.inverse_M)


def send_back(rows: Tensor, exchange: Exchange) -> Tensor:
    """The inverse of ``send_to_experts``."""
    leaving = _permute(rows, exchange.inverse_M, exchange.order_M)
    returned: Tensor = _AllToAll.apply(leaving, exchange.received, exchange.sent, exchange.group)
    return returned


def _permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(x, order, inverse)
    return permuted


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse, without a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
