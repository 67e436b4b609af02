"""One decoder layer: pre-norm self-attention and a feed-forward part, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Specs of the parts, under Megatron's names; ``mlp`` is dense or mixture of experts."""

    input_layernorm: Any
    self_attention: Any
    pre_mlp_layernorm: Any
    mlp: Any


class TransformerLayer(MegatronModule):
    """A decoder layer.

    Args:
        config: of the model.
        submodules: specs of the parts.
        layer_number: 1-based, over the whole model.
        pg_collection: process groups; None in one process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        numbered: dict[str, Any] = dict(config=config, layer_number=layer_number, pg_collection=pg_collection)
        normed: dict[str, Any] = dict(config=config, hidden_size=config.hidden_size)
        self.input_layernorm = build_module(submodules.input_layernorm, **normed)
        self.self_attention = build_module(submodules.self_attention, **numbered)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **normed)
        self.mlp = build_module(submodules.mlp, **numbered)

    def forward(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``."""
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), context)
        return hidden_states + self.mlp(self.pre_mlp_layernorm(hidden_states), context)
