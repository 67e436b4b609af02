"""Linear and embedding layers, named by how tensor parallelism splits their weight.

A column-parallel layer is split over its outputs, a row-parallel one over its inputs, a replicated one not at all.
Weights of gated projections are stored ``[stack, out, in]`` (gate first, then up) and split over ``out``, so that each
part holds matching gate and up rows whatever the number of ranks.

Who communicates: a column-parallel layer does not. Its input is what every rank holds, so the caller enters the
parallel region once for all layers that read it, with ``parallel_input`` (or not at all, for a constant). A
row-parallel layer and the embedding leave the region: their partial sums are added up over the ranks, and with sequence
parallelism each rank keeps its own rows. A forward returns the output tensor alone, not Megatron's ``(output, bias)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.cross_entropy import require_in_range
from megatron.core.tensor_parallel.initialization import InitMethod, init_method_normal
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_rows,
    group_size,
    reduce_from_tensor_parallel,
    reduce_scatter_rows,
)
from megatron.core.tensor_parallel.shards import draw, local_part, own_region, split_parameter, sum_gradient_over_tp
from megatron.core.transformer.transformer_config import TransformerConfig


def parallel_input(x: Tensor, config: TransformerConfig, tp_group: ProcessGroup | None) -> Tensor:
    """Enter the tensor-parallel region: all rows, on every rank; gradients are summed over the ranks.

    With sequence parallelism ``x`` holds own rows and all rows are gathered.
    """
    return gather_rows(x, tp_group) if config.sequence_parallel else copy_to_tensor_parallel(x, tp_group)


def parallel_output(partial: Tensor, config: TransformerConfig, tp_group: ProcessGroup | None) -> Tensor:
    """Leave the tensor-parallel region: the sum over ranks; with sequence parallelism own rows of it."""
    reduce = reduce_scatter_rows if config.sequence_parallel else reduce_from_tensor_parallel
    return reduce(partial, tp_group)


class _Linear(nn.Module):
    """``x W^T + b``: ``[..., input_size] -> [..., num_stacked * output_size]``.

    Args:
        input_size, output_size: widths of the whole layer.
        config: gives the data type and the default initialization.
        init_method: fills the whole weight in place; normal with ``init_method_std`` when None.
        bias: add a bias, initialized to zero.
        num_stacked: projections of one input that share this layer; above 1 the weight is ``[stack, out, in]``.
        tp_group: ranks that share the weight; None for one.
    """

    # Which dimension of the weight is split, from the end: None, -2 (outputs) or -1 (inputs).
    split_dim: int | None = None

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
        self.config, self.tp_group = config, tp_group
        self.input_size, self.output_size, self.num_stacked = input_size, output_size, num_stacked
        self.init_method = init_method or init_method_normal(config.init_method_std)
        stack = () if num_stacked == 1 else (num_stacked,)
        self.weight = self._parameter((*stack, output_size, input_size), self.split_dim)
        # A bias is as long as the outputs, so it is split where they are.
        split = None if self.split_dim != -2 else -1
        self.bias = self._parameter((*stack, output_size), split) if bias else None
        if self.split_dim is None and config.sequence_parallel:
            sum_gradient_over_tp(self.weight, self.bias)
        self.reset_parameters()

    def _parameter(self, shape: tuple[int, ...], split_dim: int | None) -> nn.Parameter:
        group = None if split_dim is None else self.tp_group
        return split_parameter(shape, self.config.params_dtype, group, len(shape) + (split_dim or -1))

    def reset_parameters(self) -> None:
        """Draw the weight, zero the bias."""
        with torch.no_grad():
            draw(self.weight, self.init_method, self.config.params_dtype)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Stacked projections follow each other in the last dimension of the output."""
        bias = None if self.bias is None else local_part(self.bias).flatten()
        return F.linear(x, local_part(self.weight).flatten(0, -2), bias)

    def extra_repr(self) -> str:
        stack = "" if self.num_stacked == 1 else f", num_stacked={self.num_stacked}"
        return f"{self.input_size}, {self.output_size}{stack}, bias={self.bias is not None}"


class ColumnParallelLinear(_Linear):
    """Linear layer split over its outputs: all rows in, own outputs of all rows out; it does not communicate."""

    split_dim = -2


class RowParallelLinear(_Linear):
    """Linear layer split over its inputs: own inputs of all rows in; all outputs out (own rows with SP)."""

    split_dim = -1

    def forward(self, x: Tensor) -> Tensor:
        """Partial products, summed over the ranks."""
        if group_size(self.tp_group) == 1:
            return super().forward(x)
        partial = F.linear(x, local_part(self.weight).flatten(0, -2))
        output = parallel_output(partial, self.config, self.tp_group)
        return output if self.bias is None else output + self.bias.flatten()


class ReplicatedLinear(_Linear):
    """Linear layer that every tensor-parallel rank holds whole: latent down-projections, indexer projections."""


class VocabParallelEmbedding(nn.Module):
    """Token embedding split over the vocabulary.

    Args:
        num_embeddings: rows of the whole table, padding included.
        embedding_dim: width of the residual stream.
        config: gives the data type and the default initialization.
        init_method: fills the whole table in place; normal with ``init_method_std`` when None.
        tp_group: ranks that share the table; None for one.
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
        self.config, self.tp_group, self.num_embeddings = config, tp_group, num_embeddings
        self.init_method = init_method or init_method_normal(config.init_method_std)
        self.weight = split_parameter((num_embeddings, embedding_dim), config.params_dtype, tp_group, 0)
        self._own_ids = own_region(self.weight)[1][0]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table."""
        draw(self.weight, self.init_method, self.config.params_dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[T]`` token ids -> ``[T, embedding_dim]``; own rows of it with sequence parallelism."""
        if group_size(self.tp_group) == 1:
            return F.embedding(input_ids, local_part(self.weight))
        require_in_range("Token id", input_ids, self.num_embeddings)
        own = (input_ids >= self._own_ids.start) & (input_ids < self._own_ids.stop)
        local_ids = (input_ids - self._own_ids.start).masked_fill(~own, 0)
        found = F.embedding(local_ids, local_part(self.weight))
        return parallel_output(found.masked_fill(~own[..., None], 0), self.config, self.tp_group)
