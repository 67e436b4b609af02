"""Rows to the ranks that hold their experts, and back: the all-to-all of expert parallelism.

Rows arrive here sorted by expert, and experts lie in order over the ranks of the group, so what goes to one rank is one
run of rows. A rank receives its experts' rows source by source, and sorts them once more by expert.

How many rows come is decided by the routers of other ranks. A first, small all-to-all carries the counts, and reading
them is the one place inside a layer where the host waits for the device: the receive buffer needs a size. The sizes
also steer the three all-to-alls of rows (inputs, router weights, outputs) and their gradients.

An all-to-all is started and waited for apart, so that a layer can compute in between: on an accelerator rows travel on
the network's own stream. What waits in the forward pass starts in the backward pass and the other way round, so that
gradients travel while the same computation's backward runs. Nothing may read, or free, what is under way.

Left out: a capacity (no token is dropped).

Shape legend: N rows sent (a copy for each chosen expert), M rows received, E experts, L experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.mappings import permute_rows


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


def start_to_experts(rows: Tensor, exchange: Exchange) -> Callable[[], Tensor]:
    """Start rows that are sorted by expert ``[N, ...]`` on their way.

    Returns:
        What waits for the rows of own experts, and returns them sorted by expert ``[M, ...]``.
    """
    arrive = _start(rows, _Trip(exchange.sent, exchange.received, exchange.group))
    return lambda: permute_rows(arrive(), exchange.order_M, exchange.inverse_M)


def send_back(rows: Tensor, exchange: Exchange) -> Tensor:
    """Rows of own experts, sorted by expert ``[M, ...]`` -> where they came from, as they lay there ``[N, ...]``."""
    leaving = permute_rows(rows, exchange.inverse_M, exchange.order_M)
    return _start(leaving, _Trip(exchange.received, exchange.sent, exchange.group))()


class _Trip:
    """One all-to-all, of rows and later of their gradients, and what is under way."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def start(self, x: Tensor, back: bool = False) -> Tensor:
        """Send, and return what will hold the rows once they are waited for."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        x, out = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)
        self._under_way = work, x, out  # x must outlive the sending
        return out

    def wait(self) -> Tensor:
        """The rows, arrived. Nothing is held any longer, so that recomputed activations are not kept."""
        assert self._under_way is not None
        (work, _, out), self._under_way = self._under_way, None
        work.wait()
        return out


def _start(x: Tensor, trip: _Trip) -> Callable[[], Tensor]:
    under_way = _Depart.apply(x, trip)

    def arrive() -> Tensor:
        arrived: Tensor = _Arrive.apply(under_way, trip)
        return arrived

    return arrive


class _Depart(torch.autograd.Function):
    """Starts rows; backward waits for their gradient, which ``_Arrive`` has started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.wait(), None


class _Arrive(torch.autograd.Function):
    """Waits for rows; backward starts their gradient. What it returns stands for a gradient that is under way."""

    @staticmethod
    def forward(ctx: Any, under_way: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait().view_as(under_way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(grads[0], back=True)
        return grads[0], None
