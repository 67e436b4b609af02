"""Selections that outlive one layer: IndexShare's cache, the recorder and replay.

``TopKCache`` belongs to one forward pass of one microbatch and is passed down as an argument. Layers that own an
indexer put their selection in; layers that reuse one take it out. Activation recompute finds the selection of its own
microbatch there, whatever ran in between, and never selects a second time. Nothing is kept on modules, configs or
masks.

``record_topk`` and ``replay_topk`` are for reinforcement learning: the keys that one pass selected are attended to by
another, in forward, recompute and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from .backends.protocol import TopK
from .collectives import first_rank
from .layout import Layout, Segment

if TYPE_CHECKING:
    from .context import ForwardContext
    from .context_parallel import RowShards


class TopKCache:
    """Selections of one microbatch by layer number (1-based). Scores are dropped: only ids outlive the layer."""

    def __init__(self) -> None:
        self._selections: dict[int, TopK] = {}

    def get(self, layer_number: int) -> TopK | None:
        """The selection of ``layer_number``, or None before that layer ran."""
        return self._selections.get(layer_number)

    def require(self, source_layer: int, layer_number: int) -> TopK:
        """The selection that ``layer_number`` reuses.

        Raises:
            ValueError: ``source_layer`` did not run in this pass.
        """
        topk = self._selections.get(source_layer)
        if topk is None:
            raise ValueError(
                f"Layer {layer_number} reuses the keys of layer {source_layer}, which did not run in this pass: "
                "run all layers of a pass with one context, source first."
            )
        return topk

    def put(self, layer_number: int, topk: TopK) -> None:
        """Keep the ids and lengths of ``layer_number``."""
        self._selections[layer_number] = topk._replace(scores_TK=None)


class TopKRecord(dict[int, TopK]):
    """Selections of one forward pass by layer number (1-based), and what their rows and ids refer to.

    Attributes:
        layout: of the pass, on this rank; None before one ran.
        first_holder: the first of the ranks that hold these rows too (tensor parallelism), counted in the world; None
            where that is not known.
    """

    def __init__(self, selections: Mapping[int, TopK] | None = None, layout: Layout | None = None) -> None:
        super().__init__(selections or {})
        self.layout = layout
        self.first_holder: int | None = None


class _Selecting(Protocol):
    layer_number: int
    source_layer: int
    shards: RowShards
    indexer: nn.Module | None
    recorder: TopKRecord | None
    replayed: Mapping[int, TopK] | None


@contextmanager
def record_topk(model: nn.Module) -> Iterator[TopKRecord]:
    """Record each layer's selection: yields a mapping from layer number to ``TopK``, filled by forward passes.

    Ids are global to the flattened keys of the pass's layout, which the record holds too. Layers that reuse a selection
    hold no entry. A later forward pass replaces an earlier one's entries; activation recompute adds none.

    Raises:
        ValueError: the model has no DSA layer, or is being recorded already.
    """
    layers = _selecting_layers(model)
    if any(layer.recorder is not None for layer in layers.values()):
        raise ValueError("The model's selections are being recorded already: leave that record_topk block first.")
    record = TopKRecord()
    for layer in layers.values():
        layer.recorder = record
    try:
        yield record
    finally:
        for layer in layers.values():
            layer.recorder = None


@contextmanager
def replay_topk(model: nn.Module, record: Mapping[int, TopK]) -> Iterator[None]:
    """Attend to the recorded keys instead of selecting: forward passes started in the block use exactly those ids.

    Their backward passes use them too, also after the block and under activation recompute. Indexer losses score the
    recorded ids. A block inside another one takes over until it ends. A pass in another layout than a ``TopKRecord``'s
    is refused; a plain mapping is taken at its word.

    Raises:
        ValueError: the record lacks a layer that selects, or has one that does not.
    """
    layers = _selecting_layers(model)
    if set(record) != set(layers):
        raise ValueError(
            f"The record holds layers {sorted(record)}, but the layers that select are {sorted(layers)}: record with a "
            "model of the same IndexShare pattern."
        )
    outer = {number: layer.replayed for number, layer in layers.items()}
    for layer in layers.values():
        layer.replayed = record
    try:
        yield
    finally:
        for number, layer in layers.items():
            layer.replayed = outer[number]


def remembered(layer: _Selecting, context: ForwardContext) -> TopK | None:
    """The keys that need no selection: another layer's, those of this pass before a recompute, or recorded ones.

    Raises:
        ValueError: the layer reuses one that did not run, or the record is of a pass in another layout.
    """
    if layer.indexer is None:
        return context.topk_cache.require(layer.source_layer, layer.layer_number)
    topk = context.topk_cache.get(layer.layer_number)
    if topk is not None or layer.replayed is None:
        return topk
    topk = layer.replayed[layer.layer_number]
    rows = topk.indices_TK.shape[0]
    if rows != context.layout.num_rows:
        raise ValueError(
            f"The record of layer {layer.layer_number} holds {rows} rows, but this pass has "
            f"{context.layout.num_rows}: replay with the microbatch that was recorded."
        )
    if isinstance(layer.replayed, TopKRecord) and layer.replayed.layout is not None:
        if found := different_segments(layer.replayed.layout, context.layout):
            raise ValueError(
                f"The record of layer {layer.layer_number} is of another layout than this pass's (it has {found[0]} "
                f"where the pass has {found[1]}), so its ids would mean other keys: replay with the microbatch that "
                "was recorded, or load the file with the pass's layout."
            )
    return topk


def remember(layer: _Selecting, context: ForwardContext, topk: TopK) -> TopK:
    """Keep what ``layer`` attends to, once a pass, for sharing, recompute and the recorder; returned without scores.

    A record outlives the pass: one made in inference mode can be replayed in training.
    """
    topk = topk._replace(scores_TK=None)
    if layer.indexer is not None and context.topk_cache.get(layer.layer_number) is None:
        context.topk_cache.put(layer.layer_number, topk)
        if layer.recorder is not None:
            if layer.recorder.layout != context.layout:
                layer.recorder.clear()  # of another pass, which may have ended early
            layer.recorder[layer.layer_number] = _outside_inference(topk)
            layer.recorder.layout, layer.recorder.first_holder = context.layout, first_rank(layer.shards.tp)
    return topk


def _outside_inference(topk: TopK) -> TopK:
    if not topk.indices_TK.is_inference():
        return topk
    with torch.inference_mode(False):  # autograd refuses to save tensors of inference mode
        return TopK(topk.indices_TK.clone(), topk.length_T.clone(), None)


def _selecting_layers(model: nn.Module) -> dict[int, _Selecting]:
    """The ``DSAttention`` modules of ``model`` that own an indexer, by layer number."""
    from .attention import DSAttention

    layers = (m for m in model.modules() if isinstance(m, DSAttention) and m.indexer is not None)
    found = {layer.layer_number: cast(_Selecting, layer) for layer in layers}
    if not found:
        raise ValueError("The model has no DSA layer that selects keys: use experimental_attention_variant='dsa'.")
    return found


def different_segments(recorded: Layout, present: Layout) -> tuple[Segment | None, Segment | None] | None:
    """The first segments that differ, or None: ids count keys and rows of their own layout.

    How many keys follow the last document does not matter.
    """
    pairs = zip_longest(recorded.segments, present.segments)
    return next(((theirs, ours) for theirs, ours in pairs if theirs != ours), None)
