"""The mixture-of-experts layer: router, routed experts, shared experts.

Padding rows (those in no segment of the layout) are taken out first, with ids that come from host integers: they are
routed nowhere, counted nowhere, and their output is zero. So no later step masks anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
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
        self.router = build_module(submodules.router, config=config)
        self.experts = build_module(submodules.experts, config=config)
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
        layout = context.layout
        if layout.num_valid_rows == layout.num_rows:
            return self._forward_valid(hidden_states, context)
        rows = valid_row_ids(layout, hidden_states.device)
        output = self._forward_valid(hidden_states[rows], context)
        return torch.zeros_like(hidden_states).index_copy(0, rows, output)

    def _forward_valid(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        routing = self.router(hidden_states)
        trains = self.training and torch.is_grad_enabled()
        if trains:
            routing = self._attach_balance_loss(routing, context)
        output, load_E = self.experts(hidden_states, routing)
        if trains:
            context.losses.expert_loads[self.layer_number] = load_E
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)

    def _attach_balance_loss(self, routing: Routing, context: ForwardContext) -> Routing:
        coeff = self.config.moe_aux_loss_coeff
        if self.config.moe_router_load_balancing_type != "seq_aux_loss" or coeff == 0:
            return routing
        loss_sum = sequence_balance_loss(routing.scores_TE, self.config.moe_router_topk, context.layout)
        context.losses.balance_sums[self.layer_number] = loss_sum.detach()
        scaled = coeff * context.losses.scale(context.layout.num_valid_rows) * loss_sum
        return routing._replace(weights_TK=attach_loss(routing.weights_TK, scaled))
