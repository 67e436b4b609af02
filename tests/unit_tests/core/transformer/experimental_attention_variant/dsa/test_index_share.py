"""Selections that outlive a layer: microbatches in flight, activation recompute, the recorder and replay.

The fault behind most of these: a holder of selected keys hangs on something that outlives one forward pass (a mask, the
config, a module), so that a recomputed layer reads another microbatch's keys, without an error and with wrong logits.
Here the holder is an argument. ``test_a_shared_holder_would_be_noticed`` puts the fault in and sees the comparison
fail. Cannot occur: sharing across pipeline stages and between repeated MTP layers (this package has neither).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    Layout,
    LossTracker,
    TopKCache,
    record_topk,
    replay_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

from . import oracle
from .helpers import LATENT, ROPE, build_attention, context_for, draw, model_config, randomize

# Layers 1, 2 and 5 select; 3 and 4 reuse layer 2's keys.
PATTERN: dict[str, Any] = {"num_layers": 5, "topk_freq": 3, "skip_topk_offset": 2, "topk": 3}
LAYOUTS = {"batch": Layout.causal(2, 7), "packed": Layout.packed((0, 5, 12), (0, 6, 14))}
LOSSES = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


class Layer(nn.Module):
    def __init__(self, config: MLATransformerConfig, number: int) -> None:
        super().__init__()
        self.project = nn.Linear(24, 2 * (LATENT + ROPE) + LATENT + ROPE + 10, dtype=torch.float64)
        self.attention = build_attention(config, number)
        self.output = nn.Linear(2 * LATENT, 24, dtype=torch.float64)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        query, key, qr = self.project(x).split((2 * (LATENT + ROPE), LATENT + ROPE, 10), dim=-1)
        attended = self.attention(query.unflatten(-1, (2, -1)), key, x=x, qr=qr, context=context)
        return x + self.output(attended).sin()


class Model(nn.Module):
    """Layers of a model, with or without activation recompute."""

    def __init__(self, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.config, self.recompute = model_config(**(PATTERN | options)), recompute
        self.layers = nn.ModuleList(Layer(self.config, n + 1) for n in range(self.config.num_layers))
        randomize(self, seed=7)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, context, use_reentrant=False) if self.recompute else layer(x, context)
        return x

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def selecting(self) -> list[int]:
        return [layer.attention.layer_number for layer in self.layers if layer.attention.indexer is not None]


def microbatch(number: int, rows: int = 14) -> Tensor:
    return draw(rows, 24, seed=1000 + number)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and actual
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different, different


def one_after_another(layout: Layout, **options: Any) -> tuple[dict[str, Tensor], list[LossTracker]]:
    """F1 B1 F2 B2 without recompute: what every other schedule has to equal."""
    model, trackers = Model(**options), [LossTracker(), LossTracker()]
    for number, losses in enumerate(trackers):
        model(microbatch(number), context_for(layout, losses)).sin().sum().backward()
    return model.gradients(), trackers


# ---- microbatches in flight ----


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("evaluated", [False, True], ids=["", "eval between"])
@pytest.mark.parametrize("layout", LAYOUTS)
@LOSSES
def test_microbatches_in_flight_do_not_meet(layout: str, sparse: bool, evaluated: bool, recompute: bool) -> None:
    expected, expected_losses = one_after_another(LAYOUTS[layout], use_sparse_loss=sparse)
    model, trackers = Model(recompute, use_sparse_loss=sparse), [LossTracker(), LossTracker()]
    outputs = [model(microbatch(n), context_for(LAYOUTS[layout], losses)) for n, losses in enumerate(trackers)]
    if evaluated:
        model.eval()
        with torch.no_grad():
            model(microbatch(5), context_for(LAYOUTS[layout]))
        model.train()
    for output in outputs:
        output.sin().sum().backward()
    assert_equal(model.gradients(), expected)
    for losses, wanted in zip(trackers, expected_losses, strict=True):
        assert losses.rows == wanted.rows and sorted(losses.kl_sums) == [1, 2, 5]
        assert losses.kl_sums == wanted.kl_sums


def test_a_shared_holder_would_be_noticed() -> None:
    """The fault itself: one holder for two microbatches. Without an error, gradients are those of other keys."""
    layout = LAYOUTS["batch"]
    expected, _ = one_after_another(layout)
    for recompute in (False, True):
        model, holder = Model(recompute), TopKCache()
        contexts = [replace(context_for(layout), topk_cache=holder) for _ in range(2)]
        for output in [model(microbatch(n), context) for n, context in enumerate(contexts)]:
            output.sin().sum().backward()
        with pytest.raises(AssertionError):
            assert_equal(model.gradients(), expected)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_each_microbatch_selects_once(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_selections(monkeypatch)
    model = Model(recompute)
    for output in [model(microbatch(n), context_for(LAYOUTS["batch"])) for n in range(2)]:
        output.sum().backward()
    assert len(calls) == 2 * len(model.selecting()) == 6


def count_selections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    select = ReferenceBackend.select

    def counted(self: ReferenceBackend, *args: Any) -> TopK:
        calls.append(1)
        return select(self, *args)

    monkeypatch.setattr(ReferenceBackend, "select", counted)
    return calls


def test_a_recomputed_loss_is_logged_and_back_propagated_once() -> None:
    results = []
    for recompute in (False, True):
        model, losses = Model(recompute), LossTracker()
        output = model(microbatch(0), context_for(LAYOUTS["batch"], losses))
        before = dict(losses.kl_sums)
        output.sum().backward()
        assert losses.kl_sums == before and losses.rows == {1: 14, 2: 14, 5: 14}
        assert not any(kl_sum.requires_grad for kl_sum in losses.kl_sums.values())
        results.append(model.gradients())
    assert_equal(*results)


def test_layers_reuse_the_nearest_selection() -> None:
    model, context = Model(), context_for(LAYOUTS["batch"])
    with record_topk(model) as record:
        model(microbatch(0), context)
    assert [model.layers[n].attention.source_layer for n in range(5)] == [1, 2, 2, 2, 5]
    assert context.topk_cache.get(3) is None and context.topk_cache.get(4) is None
    second = context.topk_cache.require(2, layer_number=4)
    assert torch.equal(second.indices_TK, record[2].indices_TK) and second.scores_TK is None
    assert not torch.equal(record[1].indices_TK, record[2].indices_TK)


def tensors_held_by(*roots: Any) -> set[int]:
    """Ids of all tensors reachable from modules and configs, parameters and caches included."""
    seen, queue, found = set(), list(roots), set()
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.add(id(thing))
        elif isinstance(thing, dict):
            queue += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            queue += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, type | Callable) or isinstance(thing, nn.Module):
            queue += vars(thing).values()
    return found


def test_nothing_is_left_on_modules_or_config() -> None:
    model = Model(recompute=True)
    model(microbatch(0), context_for(LAYOUTS["batch"])).sum().backward()  # fills rotary frequencies
    model.zero_grad()
    before = tensors_held_by(model, model.config)
    assert len(before) >= len(list(model.parameters()))
    model(microbatch(1), context_for(LAYOUTS["packed"])).sum().backward()
    model.zero_grad()
    assert tensors_held_by(model, model.config) == before
    assert not [value for value in vars(model.config).values() if isinstance(value, Tensor)]


def test_a_context_and_its_selections_die_with_the_pass() -> None:
    model = Model()
    context = context_for(LAYOUTS["batch"])
    model(microbatch(0), context).sum().backward()
    held = [weakref.ref(context.topk_cache.require(n, n).indices_TK) for n in model.selecting()]
    held.append(weakref.ref(context.topk_cache))
    assert len(held) == 4 and all(reference() is not None for reference in held)
    del context
    gc.collect()
    assert all(reference() is None for reference in held)


# ---- recorder ----


def test_the_recorder_holds_what_each_layer_selected() -> None:
    model, layout = Model(), LAYOUTS["packed"]
    with record_topk(model) as record:
        assert record == {}
        model(microbatch(0), context_for(layout))
    assert sorted(record) == model.selecting() == [1, 2, 5]
    starts, ends = row_bounds(layout, "cpu")
    for topk in record.values():
        assert topk.scores_TK is None and topk.indices_TK.shape == (14, 3) and topk.indices_TK.dtype == torch.int32
        assert topk.length_T.tolist() == (ends - starts).clamp(max=3).tolist()
        assert not topk.indices_TK.requires_grad
    first = model.layers[0]
    with torch.no_grad():
        operands = first.attention.indexer(
            microbatch(0), first.project(microbatch(0))[:, -10:], context_for(layout).positions_T
        )
        assert torch.equal(
            record[1].indices_TK, ReferenceBackend(model.config.dsa_config()).select(operands, layout, 3)[0]
        )


def test_a_later_pass_replaces_entries_and_the_block_ends() -> None:
    model, layout = Model(), LAYOUTS["batch"]
    records = []
    for number in range(2):
        with record_topk(model) as record:
            model(microbatch(number), context_for(layout))
        records.append(dict(record))
    with record_topk(model) as record:
        model(microbatch(0), context_for(layout))
        model(microbatch(1), context_for(layout))
    model(microbatch(0), context_for(layout))  # outside of the block
    for number in model.selecting():
        assert torch.equal(record[number].indices_TK, records[1][number].indices_TK)
        assert not torch.equal(records[0][number].indices_TK, records[1][number].indices_TK)


def test_recompute_records_nothing() -> None:
    """F1 F2 B1: layer 1 of the first microbatch runs again, after the second one was recorded."""
    model, layout = Model(recompute=True), LAYOUTS["batch"]
    with record_topk(model) as expected:
        model(microbatch(1), context_for(layout))
    with record_topk(model) as record:
        first, _ = (model(microbatch(n), context_for(layout)) for n in range(2))
        first.sum().backward()
    for number in model.selecting():
        assert torch.equal(record[number].indices_TK, expected[number].indices_TK)


@pytest.mark.parametrize("training", [True, False])
def test_recording_changes_no_output(training: bool) -> None:
    model = Model().train(training)
    expected = model(microbatch(0), context_for(LAYOUTS["batch"]))
    with record_topk(model):
        assert torch.equal(model(microbatch(0), context_for(LAYOUTS["batch"])), expected)


def test_the_recorder_refuses() -> None:
    model = Model()
    with record_topk(model) as record:
        with pytest.raises(ValueError, match="being recorded already: leave that record_topk block first"):
            with record_topk(model.layers[1]):
                pass
        model(microbatch(0), context_for(LAYOUTS["batch"]))
    assert sorted(record) == [1, 2, 5]  # the refused block took nothing away
    for block in (record_topk(nn.Linear(1, 1)), replay_topk(nn.Linear(1, 1), {}), record_topk(model.layers[2])):
        with pytest.raises(ValueError, match="no DSA layer that selects keys"), block:
            pass


def test_blocks_end_with_an_error() -> None:
    model = Model()
    with record_topk(model) as record:
        model(microbatch(0), context_for(LAYOUTS["batch"]))
    for block in (record_topk(model), replay_topk(model, record)):
        with pytest.raises(KeyError), block:
            raise KeyError
    assert all(m.recorder is None and m.replayed is None for m in model.modules() if isinstance(m, DSAttention))


# ---- replay ----


def other_keys(layout: Layout, k: int = 3) -> TopK:
    """Keys that no indexer would select: the earliest visible ones, at most ``k`` and at least two steps apart."""
    starts, ends = (bound.tolist() for bound in row_bounds(layout, "cpu"))
    rows = [list(range(a, b))[::2][:k] for a, b in zip(starts, ends, strict=True)]
    ids = torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)
    return TopK(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32), None)


def record_of(model: Model, layout: Layout) -> dict[int, TopK]:
    return {number: other_keys(layout) for number in model.selecting()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_replaying_ones_own_keys_changes_no_bit(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = Model().train(training), LAYOUTS["packed"]
    results: list[dict[str, Tensor]] = []
    with record_topk(model) as record:
        output = model(microbatch(0), context_for(layout))
    output.sum().backward()
    results.append({"output": output} | model.gradients())
    model.zero_grad()
    calls = count_selections(monkeypatch)
    with replay_topk(model, record):
        output = model(microbatch(0), context_for(layout))
    output.sum().backward()
    results.append({"output": output} | model.gradients())
    assert_equal(*results)
    assert not calls


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after the block"])
@LOSSES
def test_replay_holds_in_forward_recompute_and_backward(
    recompute: bool, inside: bool, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected run replaces the backend's selection, so it cannot share a fault with the replay."""
    layout, wanted = LAYOUTS["packed"], other_keys(LAYOUTS["packed"])
    plain = Model(use_sparse_loss=sparse)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceBackend, "select", lambda *_: wanted)
        expected_output = plain(microbatch(0), context_for(layout))
        expected_output.sin().sum().backward()
    calls = count_selections(monkeypatch)
    model = Model(recompute, use_sparse_loss=sparse)
    with replay_topk(model, record_of(model, layout)):
        output = model(microbatch(0), context_for(layout))
        if inside:
            output.sin().sum().backward()
    if not inside:
        with torch.no_grad():
            model(microbatch(3), context_for(layout))  # selects, and must not be what the backward pass uses
        assert len(calls) == 3
        output.sin().sum().backward()
    assert torch.equal(output, expected_output)
    assert_equal(model.gradients(), plain.gradients())
    assert len(calls) == (0 if inside else 3)


def test_the_layer_attends_to_the_replayed_keys_and_is_taught_on_them() -> None:
    layout, model = LAYOUTS["packed"], Model(num_layers=1)
    layer, losses, x = model.layers[0], LossTracker(), microbatch(0)
    seen: list[Any] = []
    layer.attention.register_forward_hook(lambda _, __, output: seen.append(output))
    layer.attention.indexer.register_forward_hook(lambda _, __, operands: seen.append(operands))
    with replay_topk(model, {1: other_keys(layout)}):
        model(x, context_for(layout, losses))
    operands, attended = seen
    query, key, _ = layer.project(x).detach().split((2 * (LATENT + ROPE), LATENT + ROPE, 10), dim=-1)
    q, kv, scale = query.unflatten(-1, (2, -1)).numpy(), key.numpy(), layer.attention.softmax_scale
    keys = [[i for i in row if i >= 0] for row in other_keys(layout).indices_TK.tolist()]
    outputs = [oracle.attend(q[t], kv, ids, scale, LATENT)[0] for t, ids in enumerate(keys)]
    np.testing.assert_allclose(attended.detach().numpy(), np.stack(outputs).reshape(14, -1), rtol=0, atol=1e-12)
    targets = [oracle.probabilities(q[t], kv, ids, scale).sum(0) if ids else np.zeros(0) for t, ids in enumerate(keys)]
    arrays = (t.detach().numpy() for t in (operands.q_TID, operands.k_SD, operands.w_TI))
    np.testing.assert_allclose(losses.kl_sums[1], oracle.kl_and_gradients(*arrays, keys, targets)[0], rtol=1e-10)


def test_an_inner_replay_takes_over_until_it_ends() -> None:
    layout, model = LAYOUTS["batch"], Model()
    with record_topk(model) as own:
        selected = model(microbatch(0), context_for(layout))
    with replay_topk(model, record_of(model, layout)):
        outer = model(microbatch(0), context_for(layout))
        with replay_topk(model, own):
            assert torch.equal(model(microbatch(0), context_for(layout)), selected)
        assert torch.equal(model(microbatch(0), context_for(layout)), outer)
    assert not torch.equal(outer, selected)
    assert torch.equal(model(microbatch(0), context_for(layout)), selected)


def test_recording_a_replay_gives_the_replayed_keys() -> None:
    layout, model = LAYOUTS["batch"], Model()
    with replay_topk(model, record_of(model, layout)), record_topk(model) as record:
        model(microbatch(0), context_for(layout))
    assert sorted(record) == model.selecting()
    assert all(torch.equal(topk.indices_TK, other_keys(layout).indices_TK) for topk in record.values())


def test_replay_refuses_a_record_of_another_model_or_pass() -> None:
    layout, model = LAYOUTS["batch"], Model()
    record = record_of(model, layout)
    for wrong in ({}, {1: record[1]}, record | {3: record[1]}):
        with pytest.raises(
            ValueError, match=r"the layers that select are \[1, 2, 5\]: record with a model of the same"
        ):
            with replay_topk(model, wrong):
                pass
    with replay_topk(model, record), pytest.raises(ValueError, match="layer 1 holds 14 rows, but this pass has 10"):
        model(microbatch(0, rows=10), context_for(Layout.causal(2, 5)))


def test_the_cache_drops_scores_and_names_the_missing_layer() -> None:
    cache = TopKCache()
    topk = other_keys(LAYOUTS["batch"])
    cache.put(2, topk._replace(scores_TK=torch.ones(14, 3)))
    kept = cache.require(2, 3)
    assert kept.scores_TK is None and kept.indices_TK is topk.indices_TK
    with pytest.raises(ValueError, match="Layer 7 reuses the keys of layer 5, which did not run in this pass"):
        cache.require(5, 7)
