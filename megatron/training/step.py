"""One optimizer step: passes over the micro-batches, clipping, update.

Gradients are sums. Every loss is a sum over rows divided by its normalizer before it is back-propagated, so
micro-batches simply add up. The normalizer is the loss tokens of the whole step with ``calculate_per_token_loss``;
otherwise, for the language-model loss, the loss tokens of the micro-batch times the micro-batches, and for the side
losses (the indexer's and the experts' balance), the valid rows of the micro-batch times the micro-batches (the loss
mask picks no rows of theirs).
Micro-batches of a step are fetched together, because the first already needs the tokens of all.

Over ranks, gradients and figures are sums as well, and so normalizers count the tokens, rows and micro-batches of all
data-parallel ranks. Every rank is given its whole micro-batch and cuts its own rows out of it here. Figures are summed
over all ranks before anyone looks at them, so that all take the same decision. The side losses' figures are means over
all rows of the step, whatever their gradients are divided by.

Outside of the model, the host waits for the device once, after the passes: losses and the gradient norm are read
together, and checked before the weights change. With ``calculate_per_token_loss`` and several data-parallel ranks it
waits before the passes too, for the loss tokens of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import group_rank, group_size
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, LossTracker
from megatron.core.transformer.moe import update_expert_bias
from megatron.training.attention_mass import MassProbe
from megatron.training.compute_params import ComputeParams
from megatron.training.config import OptimizerConfig
from megatron.training.data.batch import Batch
from megatron.training.data.shard import shard_batch
from megatron.training.flops import Workload
from megatron.training.optimizer import clip_gradients, gradient_norm, set_learning_rate, trained_parameters
from megatron.training.sharding import ShardedCompute


class RunStopped(RuntimeError):
    """The run cannot go on, which all ranks know; the message is a sentence without its end."""


class NonFiniteError(RunStopped):
    """A loss or gradient that is not finite; the weights have not changed."""


@dataclass(frozen=True)
class StepResult:
    """Figures of one step; the LM loss is a mean over tokens, the side losses of each layer are means over rows."""

    lm_loss: float
    indexer_losses: dict[int, float]
    balance_losses: dict[int, float]
    grad_norm: float
    attention_mass: dict[int, float]


@dataclass
class Engine:
    """What steps a model: the model itself (FP32 parameters), its compute copies, its optimizer, its ranks."""

    model: nn.Module
    compute: ComputeParams | ShardedCompute
    optimizer: torch.optim.Optimizer
    device: torch.device
    optimizer_config: OptimizerConfig
    per_token_loss: bool
    check_finite: bool
    groups: ProcessGroupCollection = field(default_factory=ProcessGroupCollection)


@dataclass
class _Sums:
    """Of this rank's rows, then of all ranks': the LM loss, normalized; rows, and sums of side losses over them."""

    lm_loss: Tensor
    rows: Tensor
    indexer: dict[int, Tensor] = field(default_factory=dict)
    balance: dict[int, Tensor] = field(default_factory=dict)


def document_lengths(batch: Batch) -> list[int]:
    """Lengths of the documents (plain batches: of the samples) that rows of the batch can see within."""
    packed = batch.packed_seq_params
    if packed is None:
        return [batch.tokens.shape[1]] * batch.tokens.shape[0]
    assert packed.offsets is not None
    return [stop - start for start, stop in zip(packed.offsets, packed.offsets[1:], strict=False)]


def workload(batches: Sequence[Batch], topk: int | None) -> Workload:
    """Tokens and pairs of a step."""
    return sum((Workload.of(document_lengths(batch), topk) for batch in batches), Workload())


def train_step(engine: Engine, batches: Sequence[Batch], rate: float, probe: MassProbe | None = None) -> StepResult:
    """Train on ``batches``, this data-parallel rank's micro-batches of one step; ``probe`` measures the first of them.

    Raises:
        NonFiniteError: see there.
    """
    engine.optimizer.zero_grad(set_to_none=True)
    sums = _run_passes(engine, batches, probe)
    parameters = list(trained_parameters(engine.model).values())
    engine.compute.finish()
    norm = gradient_norm(parameters, engine.groups)
    _sum_figures(sums, engine.groups)
    result = _read_figures(sums, norm, probe)
    if engine.check_finite:
        _require_finite(result)
    clip_gradients(parameters, engine.optimizer_config.clip_grad, norm)
    set_learning_rate(engine.optimizer, rate)
    engine.optimizer.step()
    update_expert_bias(engine.model, engine.groups.world)
    return result


def _run_passes(engine: Engine, batches: Sequence[Batch], probe: MassProbe | None) -> _Sums:
    engine.model.train()
    rows = float(sum(sum(document_lengths(batch)) for batch in batches))
    sums = _Sums(torch.zeros((), device=engine.device), torch.full((), rows, device=engine.device))
    step_tokens = _step_tokens(engine, batches)
    with engine.compute.installed():
        for number, batch in enumerate(batches):
            lm_normalizer, indexer_normalizer = _normalizers(engine, batch, step_tokens, len(batches))
            losses = LossTracker(normalizer=indexer_normalizer)
            loss = _token_losses(engine, batch, losses, None if number else probe) / lm_normalizer
            loss.backward()
            engine.compute.accumulate()
            sums.lm_loss += loss.detach()
            for total, part in ((sums.indexer, losses.kl_sums), (sums.balance, losses.balance_sums)):
                for layer, loss_sum in part.items():
                    total[layer] = total.get(layer, 0.0) + loss_sum
    return sums


def _normalizers(engine: Engine, batch: Batch, step_tokens: float, num_batches: int) -> tuple[float, float]:
    """Of the language-model loss and of the side losses, both at least 1."""
    if engine.per_token_loss:
        return max(step_tokens, 1.0), max(step_tokens, 1.0)
    rows = float(sum(document_lengths(batch)))
    passes = num_batches * group_size(engine.groups.dp)
    return max(float(batch.loss_mask.sum()), 1.0) * passes, max(rows, 1.0) * passes


def _step_tokens(engine: Engine, batches: Sequence[Batch]) -> float:
    """Loss tokens of the step on all data-parallel ranks; not counted where no normalizer reads them."""
    if not engine.per_token_loss:
        return 0.0
    own = sum(float(batch.loss_mask.sum()) for batch in batches)
    if group_size(engine.groups.dp) == 1:
        return own
    total = torch.full((), own, dtype=torch.float64, device=engine.device)
    dist.all_reduce(total, group=engine.groups.dp)
    return total.item()


def _token_losses(engine: Engine, batch: Batch, losses: LossTracker | None, probe: MassProbe | None) -> Tensor:
    """Sum of the losses of this rank's loss tokens of the batch; ``probe`` measures the pass."""
    cp, tp = engine.groups.cp, engine.groups.tp
    here = shard_batch(batch, group_size(cp), group_rank(cp), group_size(tp)).to(engine.device)
    packed = here.packed_seq_params
    with nullcontext() if probe is None else probe.watching(engine.model, _whole_layout(batch, packed)):
        per_token = engine.model(here.tokens, labels=here.labels, packed_seq_params=packed, losses=losses)
    return (per_token * here.loss_mask).sum()


def _whole_layout(batch: Batch, packed: PackedSeqParams | None) -> Layout:
    """Rows and keys of all ranks that ``batch`` was cut for; ``packed`` describes them where it is not plain."""
    if packed is None:
        return Layout.causal(*batch.tokens.shape)
    assert packed.offsets is not None
    return Layout.packed(packed.offsets, packed.padded_offsets)


def _sum_figures(sums: _Sums, groups: ProcessGroupCollection) -> None:
    """Sum the figures over all ranks; what tensor- or context-parallel ranks have alike counts on their first."""
    if groups.world is None:
        return
    if group_rank(groups.tp) != 0:
        sums.lm_loss.zero_()
    if group_rank(groups.tp) != 0 or group_rank(groups.cp) != 0:
        sums.rows.zero_()
    layers = [(losses, layer) for losses in (sums.indexer, sums.balance) for layer in sorted(losses)]
    message = torch.stack([sums.lm_loss, sums.rows, *(losses[layer].float() for losses, layer in layers)])
    dist.all_reduce(message, group=groups.world)
    sums.lm_loss, sums.rows, *totals = message.unbind()
    for (losses, layer), total in zip(layers, totals, strict=True):
        losses[layer] = total


def _read_figures(sums: _Sums, norm: Tensor, probe: MassProbe | None) -> StepResult:
    masses = probe.by_layer if probe is not None else {}
    by_layer = [*sums.indexer.values(), *sums.balance.values(), *masses.values()]
    figures = [sums.lm_loss, norm, sums.rows, *by_layer]
    lm_loss, grad_norm, rows, *rest = torch.stack([figure.float() for figure in figures]).tolist()
    values = iter(rest)
    indexer, balance = (
        {layer: next(values) / max(rows, 1.0) for layer in part} for part in (sums.indexer, sums.balance)
    )
    return StepResult(lm_loss, indexer, balance, grad_norm, {layer: next(values) for layer in masses})


def _require_finite(result: StepResult) -> None:
    figures = {"The LM loss": result.lm_loss, "The gradient norm": result.grad_norm}
    figures |= {f"The indexer loss of layer {layer}": loss for layer, loss in result.indexer_losses.items()}
    figures |= {f"The load balancing loss of layer {layer}": loss for layer, loss in result.balance_losses.items()}
    for name, value in figures.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"{name} is {value}")


@torch.no_grad()
def evaluate(
    engine: Engine, batches: Iterable[Batch], probe: MassProbe | None = None
) -> tuple[float, dict[int, float]]:
    """Mean loss of the loss tokens of ``batches``, and the attention mass that ``probe`` finds in the first of them."""
    engine.model.eval()
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    tokens = 0.0
    with engine.compute.installed():
        for number, batch in enumerate(batches):
            total += _token_losses(engine, batch, None, None if number else probe)
            tokens += float(batch.loss_mask.sum())
    masses = probe.by_layer if probe is not None else {}
    if engine.groups.world is not None:
        first_cp, first_tp = group_rank(engine.groups.cp) == 0, group_rank(engine.groups.tp) == 0
        counted = torch.tensor(tokens if first_cp else 0.0, dtype=torch.float64, device=engine.device)
        message = torch.stack((total, counted)) * first_tp
        dist.all_reduce(message, group=engine.groups.world)
        total, tokens = message[0], message[1].item()
    return total.item() / max(tokens, 1.0), {layer: mass.item() for layer, mass in masses.items()}
