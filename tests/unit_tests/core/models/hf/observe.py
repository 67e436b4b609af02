"""What our model computes inside, under the names of the golden files, and the comparison with them.

Everything is watched from outside, by forward hooks and by a recording stand-in for the layers' backend; the model's
code knows nothing of it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.experimental_attention_variant.dsa.precision import to_scoring_precision
from megatron.core.transformer.experimental_attention_variant.dsa.reference import score
from megatron.core.transformer.moe.router import TopKRouter

TOLERANCES = {
    "hidden": 1e-4,
    "final_norm": 1e-4,
    "attn_out": 1e-4,
    "attn_probs_mean": 1e-4,
    "router_weights": 1e-4,
    "index_scores": 1e-4,
    "logits": 5e-4,
}


class RecordingBackend:
    """Passes every verb on, and keeps what ``attend`` was given and returned."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.call: tuple[Any, Any, Any] | None = None

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._backend, verb)

    def attend(self, attention: Any, topk: Any, layout: Any) -> Any:
        attended = self._backend.attend(attention, topk, layout)
        self.call = (attention, attended, topk)
        return attended


@dataclass
class Observation:
    """Values by golden name, rows flattened ``[T, ...]``."""

    values: dict[str, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    attend_calls: dict[int, RecordingBackend] = field(default_factory=dict)
    contexts: dict[int, Any] = field(default_factory=dict)


@contextmanager
def watching(model: GPTModel) -> Iterator[Observation]:
    """Fill an observation from the forward passes that run inside the block."""
    seen = Observation()

    def keep(name: str, pick: Any = lambda out: out) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            seen.values[name] = pick(out).detach()

        return hook

    with ExitStack() as stack:

        def watch(module: nn.Module, hook: Any) -> None:
            stack.callback(module.register_forward_hook(hook).remove)

        watch(model.embedding, keep("hidden.0"))
        watch(model.decoder.final_layernorm, keep("final_norm"))
        for index, layer in enumerate(model.decoder.layers):
            watch(layer, keep(f"hidden.{index + 1}"))
            watch(layer.self_attention, keep(f"attn_out.{index}"))
            _watch_dsa(stack, seen, layer.self_attention.core_attention, index)
            for router in (m for m in layer.mlp.modules() if isinstance(m, TopKRouter)):
                watch(router, keep(f"router_topk.{index}", lambda routing: routing.experts_TK))
                watch(router, keep(f"router_weights.{index}", lambda routing: routing.weights_TK))
        yield seen


def _watch_dsa(stack: ExitStack, seen: Observation, dsa: DSAttention, index: int) -> None:
    backend = dsa.backend
    dsa.backend = seen.attend_calls[index] = RecordingBackend(backend)
    stack.callback(lambda: setattr(dsa, "backend", backend))

    def keep_context(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.contexts[index] = kwargs["context"]

    stack.callback(dsa.register_forward_pre_hook(keep_context, with_kwargs=True).remove)
    if dsa.indexer is not None:

        def keep_scores(module: nn.Module, args: Any, operands: Any) -> None:
            rounded = to_scoring_precision(operands, dsa.dsa.scoring_precision)
            seen.values[f"index_scores.{index}"] = score(rounded, dsa.dsa.scoring_relu).detach()

        stack.callback(dsa.indexer.register_forward_hook(keep_scores).remove)


@dataclass(frozen=True)
class Placement:
    """Where the rows of the golden ``[b, s]`` batch lie in the model's flattened rows."""

    rows_BS: Tensor
    input_ids: Tensor
    packed: PackedSeqParams | None


def as_batch(input_ids: Tensor) -> Placement:
    return Placement(torch.arange(input_ids.numel()).view(input_ids.shape), input_ids, None)


def as_packed(input_ids: Tensor, pad: int = 0) -> Placement:
    """The rows of a batch as documents of one packed row, each followed by ``pad`` rows of padding."""
    batch, length = input_ids.shape
    offsets = [row * length for row in range(batch + 1)]
    padded = [row * (length + pad) for row in range(batch + 1)]
    rows = torch.stack([torch.arange(length) + start for start in padded[:-1]])
    tokens = torch.full((1, padded[-1]), 5)
    tokens[0, rows.flatten()] = input_ids.flatten()
    packed = PackedSeqParams.from_offsets(tuple(offsets), tuple(padded) if pad else None)
    return Placement(rows, tokens, packed)


@torch.no_grad()
def run(model: GPTModel, placement: Placement) -> dict[str, Tensor]:
    """One forward pass, observed: golden name -> value in the golden file's shape.

    Selected keys come as sets, ``selected.i`` bool ``[b, s, s]``. Router values are in ascending order of the experts.
    """
    with watching(model) as seen:
        logits = model(placement.input_ids, packed_seq_params=placement.packed)
    rows = placement.rows_BS
    router_rows = rows if placement.packed is None else _valid_rows(placement)
    values = {"logits": logits.flatten(0, 1)[rows]}
    for name, value in seen.values.items():
        if name.startswith("index_scores"):
            values[name] = _square(value, rows)
        elif not name.startswith("router"):
            values[name] = value[rows]
    for index in seen.contexts:
        values |= _selection(seen, index, rows)
        if f"router_topk.{index}" in seen.values:
            experts, order = seen.values[f"router_topk.{index}"].sort(-1)
            weights = seen.values[f"router_weights.{index}"].gather(-1, order)
            values |= {f"router_topk.{index}": experts[router_rows], f"router_weights.{index}": weights[router_rows]}
    return values


def _valid_rows(placement: Placement) -> Tensor:
    """The router sees valid rows alone, in order."""
    return torch.arange(placement.rows_BS.numel()).view(placement.rows_BS.shape)


def _square(value_TS: Tensor, rows_BS: Tensor) -> Tensor:
    """``[T, S]`` over flattened rows and keys -> ``[b, s, s]`` within each document."""
    return torch.stack([value_TS[rows][:, rows] for rows in rows_BS])


def _selection(seen: Observation, index: int, rows_BS: Tensor) -> dict[str, Tensor]:
    """Selected sets, and the KL teacher of the sparse loss over the number of heads."""
    call = seen.attend_calls[index].call
    assert call is not None
    attention, attended, topk = call
    context = seen.contexts[index]
    keys = attention.kv_SD.shape[0]
    ids_TK = topk.indices_TK[:, :keys].long()
    valid_TK = ids_TK >= 0
    target = torch.zeros(ids_TK.shape[0], keys)
    for chunk in seen.attend_calls[index].teacher(attention, attended, topk, context.layout, False):
        part = chunk.target_RN[:, :keys] / attention.q_THD.shape[1]
        start, stop = chunk.rows
        target[start:stop].scatter_add_(1, ids_TK[start:stop].clamp(min=0), part * valid_TK[start:stop])
    chosen = torch.zeros(ids_TK.shape[0], keys).scatter_add_(1, ids_TK.clamp(min=0), valid_TK.float()) > 0
    assert torch.equal(chosen.sum(-1), topk.length_T.long())
    return {f"selected.{index}": _square(chosen, rows_BS), f"attn_probs_mean.{index}": _square(target, rows_BS)}


def golden_sets(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Golden outputs with selections as visible sets and router choices in ascending order."""
    values = {name: value for name, value in outputs.items() if not name.startswith(("topk", "router"))}
    for name, value in outputs.items():
        kind, _, index = name.partition(".")
        if kind == "topk":
            batch, length, _ = value.shape
            chosen = torch.zeros(batch, length, length, dtype=torch.bool).scatter_(2, value.clamp(min=0).long(), True)
            values[f"selected.{index}"] = chosen.tril()
        if kind == "router_topk":
            experts, order = value.long().sort(-1)
            values |= {name: experts, f"router_weights.{index}": outputs[f"router_weights.{index}"].gather(-1, order)}
    return values


def differences(values: dict[str, Tensor], golden: dict[str, Tensor]) -> dict[str, float]:
    """Golden name -> how far off, for everything outside the contract; empty where all of it holds.

    Sets and router choices must be equal (the figure is the number of wrong rows); floats within ``TOLERANCES``.
    """
    wrong = {name: float("nan") for name in golden.keys() ^ values.keys()}
    for name in golden.keys() & values.keys():
        tolerance = TOLERANCES.get(name.split(".")[0])
        if tolerance is None:
            off = float((values[name] != golden[name]).any(-1).sum())
        else:
            off = max_difference(name, values[name], golden[name])
        if not off <= (tolerance or 0):
            wrong[name] = off
    return wrong


def max_difference(name: str, value: Tensor, golden: Tensor) -> float:
    if name.startswith("index_scores"):  # future keys hold -inf in the golden files
        value, golden = value.tril(), golden.masked_fill(golden == -torch.inf, 0).tril()
    return float((value - golden).abs().max())


def clear_cut(model: GPTModel, wanted: int = 4, gap: float = 1e-3) -> Tensor:
    """Random token ids ``[wanted, topk + 4]`` on which no row's selection hangs on rounding.

    The ReLU makes exact ties of index scores common, and transformers breaks them otherwise than we do. So those
    documents are taken in which the worst selected and the best dropped key differ by ``gap`` deviations.
    """
    generator = torch.Generator().manual_seed(11)
    length = model.decoder.layers[0].self_attention.core_attention.dsa.topk + 4
    found = torch.empty(0, length, dtype=torch.int64)
    for _ in range(20):
        ids = torch.randint(0, model.vocab_size, (16, length), generator=generator)
        found = torch.cat((found, ids[_is_clear_cut(run(model, as_batch(ids)), gap)]))
        if len(found) >= wanted:
            return found[:wanted]
    raise AssertionError(f"only {len(found)} documents are clear-cut")


def _is_clear_cut(values: dict[str, Tensor], gap: float) -> Tensor:
    clear = torch.ones(len(values["logits"]), dtype=torch.bool)
    for name, scores in values.items():
        if name.startswith("index_scores"):
            selected = values[name.replace("index_scores", "selected")]
            dropped = torch.ones_like(selected).tril() & ~selected
            assert dropped.any(), "no key is dropped"
            worst = scores.masked_fill(~selected, torch.inf).amin(-1)
            best = scores.masked_fill(~dropped, -torch.inf).amax(-1)
            clear &= (worst - best >= gap * scores.std()).all(-1)
    return clear
