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

import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, LossTracker, TopKCache, record_topk

from .helpers import context_for
from .sharing_model import LAYOUTS, Model, assert_equal, count_selections, microbatch, other_keys

LOSSES = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


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


def test_the_cache_drops_scores_and_names_the_missing_layer() -> None:
    cache = TopKCache()
    topk = other_keys(LAYOUTS["batch"])
    cache.put(2, topk._replace(scores_TK=torch.ones(14, 3)))
    kept = cache.require(2, 3)
    assert kept.scores_TK is None and kept.indices_TK is topk.indices_TK
    with pytest.raises(ValueError, match="Layer 7 reuses the keys of layer 5, which did not run in this pass"):
        cache.require(5, 7)
