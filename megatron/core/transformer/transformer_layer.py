"""One decoder layer: pre-norm self-attention and a feed-forward part, each added to the residual stream.

A layer that is recomputed runs again when backward first reads something that it saved. Which operation that is may
depend on a rank's rows (those with padding have one more), and so would the order of the recomputed collectives and of
the parameter gathers that backward starts: ranks would wait for each other. So the layer's end reads what its start
saved, and every rank runs the whole layer again before anything else of its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
        recomputed = self.config.recompute_granularity == "full" and hidden_states.requires_grad
        start = hidden_states = _Start.apply(hidden_states) if recomputed else hidden_states
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), context)
        output = hidden_states + self.mlp(self.pre_mlp_layernorm(hidden_states), context)
        return _End.apply(output, start.grad_fn) if recomputed and start.grad_fn is not None else output


class _Start(torch.autograd.Function):
    """Saves an empty tensor, which only ``_End`` reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _End(torch.autograd.Function):
    """The first node of a layer's backward: begins the recompute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Any) -> Tensor:
        ctx.start = start
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.start.saved_tensors
        return grads[0], None
