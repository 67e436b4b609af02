"""The gated MLP: ``fc2(silu(gate(x)) * up(x))``, SwiGLU (Shazeer, 2020).

Gate and up are one product with ``linear_fc1``, whose weight is ``[2, ffn, hidden]``. Tensor-parallel ranks share out
the inner width: one collective on the way in (in backward, or a gather of rows with sequence parallelism), one on the
way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.initialization import scaled_init_method_normal
from megatron.core.tensor_parallel.layers import parallel_input
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """Specs of the two projections."""

    linear_fc1: Any
    linear_fc2: Any


class MLP(MegatronModule):
    """Dense SwiGLU MLP.

    Args:
        config: gives widths and initialization.
        submodules: specs of the projections.
        ffn_hidden_size: inner width; the configuration's when None.
        layer_number: unused; every feed-forward part of a layer is built with the same arguments.
        pg_collection: process groups; None in one process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        ffn_hidden_size: int | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        inner = ffn_hidden_size or config.ffn_hidden_size
        self.tp_group = tp_group = None if pg_collection is None else pg_collection.tp
        output_init = scaled_init_method_normal(config.init_method_std, config.num_layers)
        self.linear_fc1 = build_module(
            submodules.linear_fc1, config.hidden_size, inner, config=config, num_stacked=2, tp_group=tp_group
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2, inner, config.hidden_size, config=config, init_method=output_init, tp_group=tp_group
        )

    def forward(self, hidden_states: Tensor, context: ForwardContext | None = None) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``; rows do not see each other, so ``context`` is not needed."""
        hidden_states = parallel_input(hidden_states, self.config, self.tp_group)
        return self.linear_fc2(swiglu(self.linear_fc1(hidden_states)))


def swiglu(gate_and_up: Tensor) -> Tensor:
    """``[..., 2 * width]``, gate first -> ``[..., width]``."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up
