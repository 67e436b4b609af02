"""Linear and embedding layers, named by how tensor parallelism splits their weight.

A column-parallel layer is split over its outputs, a row-parallel one over its inputs, a replicated one not at all.
These layers hold whole weights: one process owns all shards, and a tensor-parallel group is refused rather than
ignored. Weights of gated projections are stored ``[stack, out, in]`` (gate first, then up), so that one contiguous
shard of ``out`` holds matching gate and up rows whatever the number of ranks.

A forward returns the output tensor alone, not Megatron's ``(output, bias)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.initialization import InitMethod, init_method_normal
from megatron.core.transformer.transformer_config import TransformerConfig


class _Linear(nn.Module):
    """``x W^T + b``: ``[..., input_size] -> [..., num_stacked * output_size]``.

    Args:
        input_size, output_size: widths of the whole layer.
        config: gives the data type and the default initialization.
        init_method: fills the weight in place; normal with ``init_method_std`` when None.
        bias: add a bias, initialized to zero.
        num_stacked: projections of one input that share this layer; above 1 the weight is ``[stack, out, in]``.
        tp_group: must be None or a group of one.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod | None = None,
        bias: bool = False,
        num_stacked: int = 1,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _check_one_rank(tp_group)
        self.input_size, self.output_size, self.num_stacked = input_size, output_size, num_stacked
        self.init_method = init_method or init_method_normal(config.init_method_std)
        stack = () if num_stacked == 1 else (num_stacked,)
        self.weight = nn.Parameter(torch.empty(*stack, output_size, input_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(*stack, output_size, dtype=config.params_dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, zero the bias."""
        with torch.no_grad():
            self.init_method(self.weight)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Stacked projections follow each other in the last dimension of the output."""
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.flatten(0, -2), bias)

    def extra_repr(self) -> str:
        stack = "" if self.num_stacked == 1 else f", num_stacked={self.num_stacked}"
        return f"{self.input_size}, {self.output_size}{stack}, bias={self.bias is not None}"


class ColumnParallelLinear(_Linear):
    """Linear layer that tensor parallelism splits over its outputs."""


class RowParallelLinear(_Linear):
    """Linear layer that tensor parallelism splits over its inputs."""


class ReplicatedLinear(_Linear):
    """Linear layer that every tensor-parallel rank holds whole: latent down-projections, indexer projections."""


class VocabParallelEmbedding(nn.Module):
    """Token embedding that tensor parallelism splits over the vocabulary.

    Args:
        num_embeddings: rows of the table, padding included.
        embedding_dim: width of the residual stream.
        config: gives the data type and the default initialization.
        init_method: fills the table in place; normal with ``init_method_std`` when None.
        tp_group: must be None or a group of one.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _check_one_rank(tp_group)
        self.init_method = init_method or init_method_normal(config.init_method_std)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=config.params_dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table."""
        with torch.no_grad():
            self.init_method(self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[...]`` token ids -> ``[..., embedding_dim]``."""
        return F.embedding(input_ids, self.weight)


def _check_one_rank(tp_group: ProcessGroup | None) -> None:
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(
            f"A tensor-parallel group of {tp_group.size()} ranks was given, but these layers hold whole weights: "
            "pass tp_group=None (tensor_model_parallel_size=1)."
        )
