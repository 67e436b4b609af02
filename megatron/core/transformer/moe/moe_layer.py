"""The mixture-of-experts layer: router, routed experts, shared experts.

Padding rows (those in no segment of the layout) are taken out first, with ids that come from host integers: they are
routed nowhere, counted nowhere, and their output is zero. So no later step masks anything.

Tensor-parallel ranks route different rows: with sequence parallelism the rows that they hold, else an equal share of
the rows that all of them hold, gathered again behind the experts. So no expert sees a row twice, and the router's
gradients are partial on each rank. Shared experts are an ordinary tensor-parallel MLP over all rows. They read what the
router reads, so with ``moe_shared_expert_overlap`` they run while rows travel to the experts of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_rows, group_size, own_rows, slice_rows
from megatron.core.tensor_parallel.shards import sum_gradient_over_tp
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.loss import attach_loss
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.load_balancing import sequence_balance_loss, valid_row_ids
from megatron.core.transformer.moe.router import Routing
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Specs of the parts; ``shared_experts`` is built where the configuration gives them a width."""

    router: Any
    experts: Any
    shared_experts: Any = None


class MoELayer(MegatronModule):
    """Routed plus shared experts (DeepSeekMoE, Dai et al., 2024).

    Args:
        config: ``moe_*`` fields.
        submodules: specs of router and experts.
        layer_number: 1-based; side losses and loads are kept under it.
        pg_collection: process groups; None in one process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection()
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.router = build_module(submodules.router, config=config)
        if group_size(self.tp_group) > 1:
            sum_gradient_over_tp(self.router.weight)
        self.experts = build_module(submodules.experts, config=config, pg_collection=pg_collection)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                ffn_hidden_size=config.moe_shared_expert_intermediate_size,
                pg_collection=pg_collection,
            )

    def forward(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``; zero on padding rows."""
        if group_size(self.tp_group) > 1:
            return self._forward_own_rows(hidden_states, context)

        def layer(valid: Tensor) -> Tensor:
            shared = self._shared(lambda: valid)
            output = self._routed(valid, context, shared)
            return output if shared is None else output + shared()

        return _on_valid_rows(layer, hidden_states, context.layout)

    def _forward_own_rows(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        own_layout = context.layout.slice_rows(*own_rows(context.layout.num_rows, self.tp_group))
        sequence_parallel = self.config.sequence_parallel
        own = hidden_states if sequence_parallel else slice_rows(hidden_states, self.tp_group)
        # All ranks run equally many rows; padding is zero, and so is what the shared experts make of it.
        layout = own_layout if sequence_parallel else context.layout
        shared = self._shared(lambda: _on_valid_rows(lambda valid: valid, hidden_states, layout))
        output = _on_valid_rows(lambda valid: self._routed(valid, context, shared), own, own_layout)
        if not sequence_parallel:
            output = gather_rows(output, self.tp_group, grad="slice")
        return output if shared is None else output + shared()

    def _shared(self, rows: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """What runs the shared experts on ``rows()`` when it is first called, and then returns their output again."""
        shared_experts = self.shared_experts
        return None if shared_experts is None else cache(lambda: shared_experts(rows()))

    def _routed(self, hidden_states: Tensor, context: ForwardContext, shared: Callable[[], Tensor] | None) -> Tensor:
        routing = self.router(hidden_states)
        trains = self.training and torch.is_grad_enabled()
        if trains:
            routing = self._attach_balance_loss(routing, context)
        meanwhile = shared if self.config.moe_shared_expert_overlap else None
        output, load_E = self.experts(hidden_states, routing, meanwhile)
        if trains:
            context.losses.expert_loads[self.layer_number] = load_E
        return output

    def _attach_balance_loss(self, routing: Routing, context: ForwardContext) -> Routing:
        coeff = self.config.moe_aux_loss_coeff
        if self.config.moe_router_load_balancing_type == "none" or coeff == 0:
            return routing
        rows = context.layout, self.tp_group, self.cp_group
        loss_sum = sequence_balance_loss(routing.scores_TE, self.config.moe_router_topk, *rows)
        context.losses.balance_sums[self.layer_number] = loss_sum.detach()
        scaled = coeff * context.loss_scale() * loss_sum
        return routing._replace(weights_TK=attach_loss(routing.weights_TK, scaled))


def _on_valid_rows(function: Callable[[Tensor], Tensor], x: Tensor, layout: Layout) -> Tensor:
    """``function`` of the rows that are no padding, and zeros between them."""
    if layout.num_valid_rows == layout.num_rows:
        return function(x)
    rows = valid_row_ids(layout, x.device)
    return torch.zeros_like(x).index_copy(0, rows, function(x[rows]))
