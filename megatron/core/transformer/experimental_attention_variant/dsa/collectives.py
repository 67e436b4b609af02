"""Collectives with gradients, over dimension 0 (rows), for tensor and context parallelism.

Tensor-parallel layers outside this folder use them through ``tensor_parallel/mappings.py``.

Each function pairs a collective with what its gradient needs, so that a layer states once whether the ranks' gradients
are equal or partial:

    function                    forward         backward
    copy_to_tensor_parallel     identity        sum over ranks
    reduce_from_tensor_parallel sum over ranks  identity
    gather_rows                 all-gather      reduce-scatter (partial gradients), or own slice (equal ones)
    start_gather_rows           all-gather      reduce-scatter
    reduce_scatter_rows         reduce-scatter  all-gather
    slice_rows                  own slice       all-gather

Rows are rank-major: rank r holds rows ``[r * R, (r + 1) * R)`` of the gathered tensor; every rank holds equally many.
A group of None, or of one rank, makes each of them the identity. Backends without a reduce-scatter on their device
(Gloo) all-reduce and slice; that is decided here and nowhere else. Ranks call these functions in one order, which is
the order on the wire too: ``start_gather_rows`` counts where it starts, not where it is waited for.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Newer torch renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of ``group``; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in ``group``; 0 for None."""
    return 0 if group is None else group.rank()


def first_rank(group: ProcessGroup | None) -> int:
    """The world's number of ``group``'s first rank; of this process for None."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    return dist.get_rank() if dist.is_initialized() else 0


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``x`` itself, which every rank holds; its gradient is the sum of the ranks' partial ones."""
    return x if group_size(group) == 1 else _apply(_Copy, x, group)


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of the ranks' partial ``x``; each rank gets the whole gradient."""
    return x if group_size(group) == 1 else _apply(_Reduce, x, group)


def gather_rows(
    x: Tensor, group: ProcessGroup | None, grad: Literal["reduce_scatter", "slice"] = "reduce_scatter"
) -> Tensor:
    """All ranks' rows ``[ranks * R, ...]``; ``grad="slice"`` where every rank computes the same gradient of them."""
    return x if group_size(group) == 1 else _apply(_Gather, x, group, grad == "reduce_scatter")


def start_gather_rows(x: Tensor, group: ProcessGroup | None) -> RowsInFlight:
    """``gather_rows`` that computes on while the rows travel: they are had by waiting for them."""
    return RowsInFlight(x, group)


def reduce_scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Own rows of the sum of the ranks' partial ``x``."""
    return x if group_size(group) == 1 else _apply(_ReduceScatter, x, group)


def slice_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Own rows of ``x``, which every rank holds; the gradient is gathered, so that every rank holds it too."""
    return x if group_size(group) == 1 else _apply(_Slice, x, group)


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``x[order]``, whose gradient goes back by the inverse permutation, without a scatter."""
    permuted: Tensor = _Permute.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def own_rows(num_rows: int, group: ProcessGroup | None) -> tuple[int, int]:
    """Half-open range of this rank's rows.

    Raises:
        ValueError: the rows do not split evenly.
    """
    size = group_size(group)
    if num_rows % size:
        raise ValueError(f"{num_rows} rows do not split over {size} ranks: pad them to a multiple of the group's size.")
    share = num_rows // size
    return group_rank(group) * share, (group_rank(group) + 1) * share


@torch.no_grad()
def all_gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``gather_rows`` without a gradient."""
    if group_size(group) == 1:
        return x
    out = x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


@torch.no_grad()
def sum_scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``reduce_scatter_rows`` without a gradient."""
    if group_size(group) == 1:
        return x
    start, stop = own_rows(x.shape[0], group)
    if not x.is_cuda:
        return _all_reduce(x, group)[start:stop].contiguous()
    out = x.new_empty(stop - start, *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


class RowsInFlight:
    """An all-gather that has been started. ``wait`` gives its rows; before, there is no tensor to read.

    Waiting orders streams on an accelerator, and the host goes on. What is sent and received is held here until then,
    and no longer: the caching allocator knows nothing of the collective's stream and would hand freed memory out again.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None) -> None:
        self._x, self._group = x, group
        self._under_way: tuple[Any, Tensor, Tensor] | None = None
        if group_size(group) > 1:
            sent, received = x.detach().contiguous(), x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
            self._under_way = _all_gather(received, sent, group=group, async_op=True), sent, received

    def wait(self) -> Tensor:
        """All ranks' rows, once; the gradient is reduce-scattered. ``x`` itself where no other rank has any."""
        if group_size(self._group) == 1:
            return self._x
        assert self._under_way is not None
        (work, _, received), self._under_way = self._under_way, None
        work.wait()
        return _apply(_Received, self._x, self._group, received)


def _all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        return all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.partial:
            return sum_scatter_rows(grads[0], ctx.group), None, None
        start, stop = own_rows(grads[0].shape[0], ctx.group)
        return grads[0][start:stop].contiguous(), None, None


class _Received(torch.autograd.Function):
    """``_Gather`` of rows that have arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, received: Tensor) -> Tensor:
        ctx.group = group
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_scatter_rows(grads[0], ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.group), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        start, stop = own_rows(x.shape[0], group)
        return x[start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.group), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
