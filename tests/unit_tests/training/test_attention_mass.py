"""The attention mass against a loop, which rows are sampled, and that it costs nothing when it is off."""

import math

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, record_topk
from megatron.training import attention_mass as module
from megatron.training.attention_mass import MassProbe, attention_mass, held_rows, sampled_rows
from tests.unit_tests.training.models import build

LAYOUTS = {
    "plain": Layout.causal(2, 7),
    "packed": Layout.packed((0, 3, 12, 12, 20)),
    "padded": Layout.packed((0, 3, 11), padded_offsets=(0, 5, 16)),
    "zigzag": Layout.zigzag((0, 16), cp_size=2, cp_rank=1),
    "short": Layout.packed((0, 2, 5)),
}


def all_rows(layout: Layout, topk: int) -> list[tuple[int, int, int]]:
    rows = []
    for s in layout.segments:
        for row in range(s.row_start, s.row_stop):
            stop = s.key_start + s.causal_offset + row - s.row_start + 1
            if stop - s.key_start > topk:
                rows.append((row, s.key_start, stop))
    return rows


@pytest.mark.parametrize("topk", [1, 3, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_see_more_than_they_select_are_sampled_evenly(name: str, topk: int) -> None:
    layout = LAYOUTS[name]
    candidates = all_rows(layout, topk)
    assert sampled_rows(layout, topk, 1000) == candidates
    some = sampled_rows(layout, topk, 3)
    assert len(some) == min(3, len(candidates))
    assert some == sorted(set(some)) and set(some) <= set(candidates)
    if len(candidates) >= 6:
        places = [candidates.index(row) for row in some]
        assert max(b - a for a, b in zip(places, places[1:], strict=False)) <= math.ceil(len(candidates) / 3)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_share_out_the_rows_that_one_process_samples(cp_size: int) -> None:
    offsets, padded = (0, 1, 14, 14, 30), (0, 8, 24, 32, 48)
    rows = sampled_rows(Layout.packed(offsets, padded), 3, 7)
    assert len(rows) == 7
    layouts = [Layout.zigzag(offsets, cp_size, rank, padded) for rank in range(cp_size)]
    held = [held_rows(rows, layout) for layout in layouts]
    assert all(set(part) <= set(all_rows(layout, 3)) for part, layout in zip(held, layouts, strict=True))
    assert sorted(row[1:] for part in held for row in part) == [row[1:] for row in rows]


@pytest.mark.parametrize("at_once", [1, 40, 2**26])
def test_the_mass_of_a_loop(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    layout, topk, scale = LAYOUTS["packed"], 3, 0.7
    q, kv = torch.randn(20, 2, 5), torch.randn(20, 5)
    indices = torch.full((20, topk), -1)
    expected = []
    rows = all_rows(layout, topk)
    for row, start, stop in rows:
        chosen = start + torch.randperm(stop - start)[:2]
        indices[row, :2] = chosen
        for head in range(2):
            weights = [math.exp(scale * (q[row, head] @ kv[key]).item()) for key in range(start, stop)]
            expected.append(sum(weights[key - start] for key in chosen.tolist()) / sum(weights))
    assert attention_mass(q, kv, scale, indices, rows).item() == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert attention_mass(q, kv, scale, indices, []).item() == 0


def test_selecting_the_whole_window_has_mass_one() -> None:
    rows = all_rows(LAYOUTS["plain"], 3)
    indices = torch.full((14, 7), -1)
    for row, start, stop in rows:
        indices[row, : stop - start] = torch.arange(start, stop)
    q, kv = torch.randn(14, 3, 4), torch.randn(14, 4)
    assert attention_mass(q, kv, 1.0, indices, rows).item() == pytest.approx(len(rows))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_probe_measures_every_layer_of_one_pass(packed: bool, recompute: str | None) -> None:
    model = build(recompute_granularity=recompute)
    params = PackedSeqParams.from_offsets((0, 9, 24)) if packed else None
    tokens = torch.randint(0, 50, (1, 24) if packed else (2, 12))
    probe = MassProbe(rows=8)
    with probe.watching(model), record_topk(model) as record:
        loss = model(tokens, labels=tokens, packed_seq_params=params).mean()
    measured = dict(probe.by_layer)
    assert set(measured) == {1, 2} and set(record) == {1}
    assert all(0 < mass.item() < 1 for mass in measured.values())
    loss.backward()
    model(tokens, labels=tokens, packed_seq_params=params)
    assert {layer: id(mass) for layer, mass in probe.by_layer.items()} == {
        layer: id(mass) for layer, mass in measured.items()
    }
    assert not any(module._forward_hooks for module in model.modules())


def test_measuring_changes_no_gradient() -> None:
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    gradients = []
    for measured in (False, True):
        model = build()
        with MassProbe(8).watching(model if measured else torch.nn.Identity()):
            loss = model(tokens, labels=tokens).mean()
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_rows_that_all_select_everything_have_no_figure() -> None:
    model, probe = build(dsa_indexer_topk=64), MassProbe(8)
    with probe.watching(model):
        model(torch.randint(0, 50, (2, 12)))
    assert probe.by_layer == {}
