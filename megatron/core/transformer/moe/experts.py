"""Routed experts: rows sorted by expert, then two grouped matrix products. No token is dropped.

Sorting and its inverse are one autograd function each way: their gradients are the other permutation and a sum over the
K copies of a row, so they need neither atomics nor a scatter, and reruns are bitwise equal.

The products run as ``grouped_mm`` on a GPU, whose group ends stay on the device. On a CPU group sizes are at hand, and
a loop of plain products is as fast, takes any width and FP64. ``grouped_mm`` wants rows that are a multiple of 16
bytes; other widths are refused on a GPU rather than computed by a loop that waits for the device.

Weights of the router multiply the hidden activation, not the output: the same sum, over the narrower of the two.

With expert parallelism a rank holds equally many consecutive experts; sorted rows visit them by ``exchange.py``.

Shape legend: T rows, K experts of a row, N = T * K, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.initialization import InitMethod, init_method_normal, scaled_init_method_normal
from megatron.core.tensor_parallel.mappings import group_size
from megatron.core.tensor_parallel.shards import draw, local_part, split_parameter
from megatron.core.transformer.mlp import swiglu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.exchange import plan_exchange, send_back, start_to_experts
from megatron.core.transformer.moe.router import Routing, count_experts
from megatron.core.transformer.transformer_config import TransformerConfig


class ExpertLinear(nn.Module):
    """One linear layer for each expert, weights stacked over experts: ``[E, out, in]`` or ``[E, stack, out, in]``.

    Ranks of ``ep_group`` hold equally many of the experts each.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        init_method: InitMethod,
        ep_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.init_method, self.dtype = init_method, dtype
        self.weight = split_parameter(shape, dtype, ep_group, 0, "ep")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        draw(self.weight, self.init_method, self.dtype)

    def forward(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """Rows sorted by expert ``[N, in]`` and the end of each expert's rows, int32 ``[E]`` -> ``[N, out]``."""
        return grouped_linear(x, local_part(self.weight).flatten(1, -2), group_ends)


class GroupedMLP(MegatronModule):
    """The routed experts of one layer, each a SwiGLU MLP of width ``moe_ffn_hidden_size``."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config)
        self.ep_group = None if pg_collection is None else pg_collection.ep
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        experts, inner, hidden = config.num_moe_experts, config.moe_ffn_hidden_size, config.hidden_size
        init = init_method_normal(config.init_method_std)
        output_init = scaled_init_method_normal(config.init_method_std, config.num_layers)
        self.linear_fc1 = ExpertLinear((experts, 2, inner, hidden), config.params_dtype, init, self.ep_group)
        self.linear_fc2 = ExpertLinear((experts, hidden, inner), config.params_dtype, output_init, self.ep_group)

    def forward(
        self, hidden_states: Tensor, routing: Routing, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``[T, hidden]`` -> the weighted sum of each row's experts ``[T, hidden]``, and rows per expert ``[E]``.

        ``meanwhile`` is called while rows are on their way to other ranks; not at all where none are sent.
        """
        assert self.config.num_moe_experts is not None
        load_E = count_experts(routing.experts_TK, self.config.num_moe_experts)
        order_N = routing.experts_TK.flatten().argsort(stable=True)
        inverse_TK = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        inverse_TK = inverse_TK.view(routing.experts_TK.shape)
        weights_N = routing.weights_TK.flatten()[order_N]
        rows_NC = _Dispatch.apply(hidden_states, order_N, inverse_TK)
        output_NC = self._visit_experts(rows_NC, weights_N, load_E, meanwhile)
        return _Combine.apply(output_NC, order_N, inverse_TK), load_E

    def _visit_experts(
        self, rows_NC: Tensor, weights_N: Tensor, load_E: Tensor, meanwhile: Callable[[], object] | None
    ) -> Tensor:
        """Weighted outputs of rows that are sorted by expert."""
        if self.ep_group is None or group_size(self.ep_group) == 1:
            return self._apply_experts(rows_NC, weights_N, load_E.cumsum(0).to(torch.int32))
        exchange = plan_exchange(load_E, self.ep_group)
        arrive, arrive_weights = start_to_experts(rows_NC, exchange), start_to_experts(weights_N, exchange)
        if meanwhile is not None:
            meanwhile()
        return send_back(self._apply_experts(arrive(), arrive_weights(), exchange.group_ends_L), exchange)

    def _apply_experts(self, rows: Tensor, weights: Tensor, group_ends: Tensor) -> Tensor:
        inner = swiglu(self.linear_fc1(rows, group_ends))
        return self.linear_fc2((inner * weights[:, None]).to(inner.dtype), group_ends)


def grouped_linear(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e].T`` for each expert e: ``[N, in]``, ``[E, out, in]`` -> ``[N, out]``.

    Raises:
        ValueError: on a GPU, a width that ``grouped_mm`` cannot take.
    """
    if not x.is_cuda:
        starts = F.pad(group_ends, (1, 0))
        sizes = (group_ends - starts[:-1]).tolist()  # a CPU tensor: nothing to wait for
        return torch.cat([rows @ w.T for rows, w in zip(x.split(sizes), weight.unbind(), strict=True)])
    multiple = 16 // x.element_size()
    if weight.shape[1] % multiple or weight.shape[2] % multiple:
        raise ValueError(
            f"An expert projection is {weight.shape[1]} x {weight.shape[2]} in {x.dtype}, but grouped matrix products "
            "on a GPU need rows of a multiple of 16 bytes: make hidden_size and moe_ffn_hidden_size multiples of "
            f"{multiple}."
        )
    return F.grouped_mm(x, weight.transpose(1, 2), offs=group_ends)


class _Dispatch(torch.autograd.Function):
    """Rows ``[T, C]`` -> a copy for each expert, sorted by expert ``[N, C]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return x[order_N // inverse_TK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_TK,) = ctx.saved_tensors
        return grads[0][inverse_TK].sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    """Sorted copies ``[N, C]`` -> the sum of each row's copies ``[T, C]``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.copies = inverse_TK.shape[1]
        return y[inverse_TK].sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return grads[0][order_N // ctx.copies], None, None
