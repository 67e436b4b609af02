"""The recorder and replay: the keys of one pass, attended to by another in forward, recompute and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    Layout,
    LossTracker,
    load_topk,
    record_topk,
    replay_topk,
    save_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TopK
from megatron.core.transformer.experimental_attention_variant.dsa.index_share import remembered
from megatron.core.transformer.experimental_attention_variant.dsa.layout import row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from . import oracle
from .helpers import LATENT, ROPE, context_for
from .sharing_model import LAYOUTS, Model, assert_equal, count_selections, microbatch, other_keys

LOSSES = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


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


def test_a_record_is_of_one_pass() -> None:
    """A pass in another layout that ends early leaves its own entries alone, not a mix."""
    model, layout = Model(), LAYOUTS["batch"]
    other = Layout.causal(1, layout.num_rows)
    with record_topk(model) as record:
        model(microbatch(0), context_for(layout))
        hook = model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(InterruptedError):
            model(microbatch(0), context_for(other))
        hook.remove()
    assert sorted(record) == [1] and record.layout == other


def stop(*_: Any) -> None:
    raise InterruptedError


def test_keys_of_an_inference_pass_can_train() -> None:
    """Autograd refuses to save tensors that inference mode made, as some backends do with the ids."""
    model, layout = Model(), LAYOUTS["packed"]
    with torch.inference_mode(), record_topk(model) as record:
        model(microbatch(0), context_for(layout))
    assert not any(x.is_inference() for topk in record.values() for x in topk[:2])
    with replay_topk(model, record):
        model(microbatch(0), context_for(layout)).sum().backward()


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


def test_replay_refuses_a_record_of_another_layout(tmp_path: Path) -> None:
    """Equally many rows, but other documents: the ids would be keys of a neighbour, or of the future."""
    model, packed, batch = Model(), LAYOUTS["packed"], LAYOUTS["batch"]
    assert packed.num_rows == batch.num_rows
    with record_topk(model) as record:
        model(microbatch(0), context_for(packed))
    assert record.layout == packed
    save_topk(tmp_path / "keys", record)
    for known in (record, load_topk(tmp_path / "keys", packed)):
        with replay_topk(model, known):
            with pytest.raises(ValueError, match=r"layer 1 is of another layout than this pass's \(it has Segment\("):
                model(microbatch(0), context_for(batch))
            more_keys = Layout(packed.num_rows, packed.num_keys + 3, packed.segments)
            assert remembered(model.layers[0].attention, context_for(more_keys)) is known[1]
            fewer = Layout(packed.num_rows, packed.num_keys, packed.segments[:-1])
            with pytest.raises(ValueError, match="where the pass has None"):
                remembered(model.layers[0].attention, context_for(fewer))
