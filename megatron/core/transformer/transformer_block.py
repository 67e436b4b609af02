"""The stack of decoder layers and the final norm, with activation recompute.

With ``recompute_granularity="full"`` a layer keeps its input alone and runs again in backward. What one microbatch's
layers share (selected keys, side losses, expert loads) lives in the ``ForwardContext`` that the recomputed call gets
again, keyed by layer, so that recompute neither reads another microbatch's state nor counts anything twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa.loss import recompute_contexts
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerBlockSubmodules:
    """Specs of the layers, first to last, and of the final norm."""

    layer_specs: list[ModuleSpec]
    layer_norm: Any


class TransformerBlock(MegatronModule):
    """Decoder layers and final norm.

    Args:
        config: of the model.
        submodules: one spec a layer.
        pg_collection: process groups; None in one process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            build_module(spec, config=config, layer_number=number, pg_collection=pg_collection)
            for number, spec in enumerate(submodules.layer_specs, start=1)
        )
        self.final_layernorm = build_module(submodules.layer_norm, config=config, hidden_size=config.hidden_size)

    def forward(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``, normed."""
        recompute = self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                hidden_states = checkpoint(
                    layer, hidden_states, context, use_reentrant=False, context_fn=recompute_contexts
                )
            else:
                hidden_states = layer(hidden_states, context)
        self._count_expert_loads(context)
        return self.final_layernorm(hidden_states)

    @torch.no_grad()
    def _count_expert_loads(self, context: ForwardContext) -> None:
        for layer in self.layers:
            moe = layer.mlp
            if isinstance(moe, MoELayer) and moe.layer_number in context.losses.expert_loads:
                moe.router.local_tokens_per_expert += context.losses.expert_loads[moe.layer_number]
