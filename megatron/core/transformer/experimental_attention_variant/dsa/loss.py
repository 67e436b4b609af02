"""Scaling, attachment and logging of the indexer's KL loss. No kernels.

The loss is attached to the attention's output: the output's values do not change, and backward hands the loss its
gradient, so callers back-propagate the language-model loss alone and activation recompute needs no extra output. What
is back-propagated is

    coeff * grad_scale * (KL sum of this rank's rows) / normalizer

and gradients are only ever summed over microbatches and ranks. ``normalizer`` is the loss tokens of the global batch
with ``calculate_per_token_loss``; else the valid rows of the microbatch over its context-parallel ranks, times the
microbatches, times the data-parallel ranks. ``grad_scale`` is whatever multiplies the main loss (a loss scaler).

Logging keeps one detached KL sum a layer, of the pass that backward reads: a recomputed forward counts once.

Where a forward pass is recomputed, autograd drops what the first pass saves, so kernels need neither its teacher nor
its loss, if whoever checkpoints says so with ``recompute_contexts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

_recomputed_later: ContextVar[bool] = ContextVar("recomputed_later", default=False)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint``: tells the first pass that it will run again before backward."""
    return _first_pass(), nullcontext()


@contextmanager
def _first_pass() -> Iterator[None]:
    token = _recomputed_later.set(True)
    try:
        yield
    finally:
        _recomputed_later.reset(token)


def recomputed_later() -> bool:
    """Whether this forward pass will run again before backward, which reads nothing of what this one saves."""
    return _recomputed_later.get()


class LossTracker:
    """Side losses of one microbatch: what they are scaled by, and what each layer's came to.

    Args:
        normalizer: what KL sums are divided by; None means the microbatch's valid rows over its context-parallel ranks.
        grad_scale: factor of the main loss that side losses must follow, a number or an FP32 scalar tensor.

    Attributes:
        kl_sums: detached FP32 KL sum of this rank's rows by layer number (1-based).
        rows: this rank's valid rows behind each of them; divide by them where both are summed over ranks.
        balance_sums: detached FP32 sums of the experts' balance loss over rows, by layer number.
        expert_loads: int64 rows of this rank per expert, by layer number.
    """

    def __init__(self, normalizer: float | None = None, grad_scale: float | Tensor = 1.0) -> None:
        if normalizer is not None and normalizer <= 0:
            raise ValueError(f"The loss normalizer is {normalizer}, but losses are divided by it: give a positive one.")
        self.normalizer = normalizer
        self.grad_scale = grad_scale
        self.kl_sums: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}
        self.balance_sums: dict[int, Tensor] = {}
        self.expert_loads: dict[int, Tensor] = {}

    def record(self, layer_number: int, kl_sum: Tensor, rows: int) -> None:
        """Keep a layer's KL sum for logging, unless it will be recomputed; in order of layers, whichever ran first."""
        if not recomputed_later():
            self.kl_sums = dict(sorted((self.kl_sums | {layer_number: kl_sum.detach()}).items()))
            self.rows[layer_number] = rows

    def scale(self, rows: int) -> float | Tensor:
        """Factor on a KL sum over ``rows`` valid rows, without the coefficient."""
        return self.grad_scale / (self.normalizer or max(rows, 1))


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0], torch.ones_like(loss)


def attach_loss(output: Tensor, loss: Tensor) -> Tensor:
    """``output`` unchanged; whatever gradient reaches it, the scalar ``loss`` is back-propagated with factor 1."""
    attached: Tensor = _AttachLoss.apply(output, loss)  # type: ignore[no-untyped-call]
    return attached
