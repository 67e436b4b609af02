"""Latent keys travel while the indexer scores: what happens in which order, and that nobody reads keys too early.

One spawn of four Gloo processes runs all cases. Their all-gathers are *late*: a started one leaves NaN in its rows,
and the rows arrive when they are waited for, which is the worst that a network may do. Each check is also shown
failing, on a mistake that is put in at run time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    Layout,
    LossTracker,
    collectives,
    context_parallel,
    record_topk,
    replay_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.collectives import RowsInFlight, start_gather_rows
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.experimental_attention_variant.dsa.context_parallel import (
    KeysInFlight,
    RowShards,
    pairs_by_rank,
)
from tests.ranks import run_on_ranks

from .test_parallel import (
    PADDED,
    REAL,
    WIDTH,
    Case,
    check,
    fresh,
    groups_of,
    local_inputs,
    make_config,
    make_module,
    rows_of,
)

WORLD = 4
CP, TP, TP_SP, BOTH = Case(1, 2, False, True), Case(2, 1, False, True), Case(2, 1, True, True), Case(2, 2, True, False)
CASES = [CP, TP, TP_SP, BOTH]

# "start" and "wait" are the two ends of an asynchronous all-gather; "gather" is one that is waited for at once.
INDEXER, KV = ["start indexer keys", "wait indexer keys"], "start latent keys"
ORDERS = {
    CP: [*INDEXER, KV, "select", "wait latent keys", "attend"],
    TP: [*INDEXER, "select", "gather ids", "attend"],  # every rank holds all latent keys
    TP_SP: [*INDEXER, KV, "select", "gather ids", "wait latent keys", "attend"],
    BOTH: [
        *("gather indexer keys", *INDEXER, "gather latent keys", KV),
        *("select", "gather ids", "wait latent keys", "attend"),
    ],
}
REPLAYED = {
    CP: [KV, "wait latent keys", "attend"],
    TP: ["attend"],
    TP_SP: [KV, "wait latent keys", "attend"],
    BOTH: ["gather latent keys", KV, "wait latent keys", "attend"],
}


class Late:
    """A collective whose rows are there once they have been waited for."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self.wait = arrive


@contextmanager
def late_gathers(events: list[str]) -> Iterator[None]:
    """Make asynchronous all-gathers late, and note what happens."""
    real = collectives._all_gather

    def gather(out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Late | None:
        name = "ids" if not x.is_floating_point() else "latent keys" if x.shape[1] == WIDTH else "indexer keys"
        if not async_op:
            if x.dim() == 2:  # the lengths go with the ids
                events.append(f"gather {name}")
            real(out, x, group=group)
            return None
        events.append(f"start {name}")
        out.fill_(float("nan"))

        def arrive() -> None:
            events.append(f"wait {name}")
            real(out, x, group=group)

        return Late(arrive)

    with patch.object(collectives, "_all_gather", gather):
        yield


def spy(module: DSAttention, events: list[str]) -> None:
    for name in ("select", "attend"):
        verb = getattr(module.backend, name)

        def noted(*args: Any, verb: Any = verb, name: str = name) -> Any:
            events.append(name)
            return verb(*args)

        setattr(module.backend, name, noted)


def make_rank(case: Case, rank: int) -> tuple[DSAttention, dict[str, Tensor], ForwardContext] | None:
    groups, tp_rank, cp_rank = groups_of(case.tp, case.cp, rank)
    if rank >= case.tp * case.cp:
        return None
    packed, losses = PackedSeqParams.from_offsets(REAL, PADDED), LossTracker(normalizer=float(REAL[-1]))
    context = ForwardContext.build(1, len(rows_of(case, cp_rank)), packed, "cpu", losses, groups.cp)
    return make_module(make_config(case, parallel=True), groups), local_inputs(case, tp_rank, cp_rank), context


def forward(module: DSAttention, inputs: dict[str, Tensor], context: ForwardContext) -> Tensor:
    return module(inputs["query"], inputs["key"], x=inputs["x"], qr=inputs["qr"], context=context)


def orders(case: Case, rank: int) -> tuple[list[str], list[str]] | None:
    """What one forward pass does, and what one does that replays its selection without training anything."""
    made = make_rank(case, rank)
    if made is None:
        return None
    module, inputs, context = made
    events: list[str] = []
    spy(module, events)
    with late_gathers(events), record_topk(module) as record:
        forward(module, inputs, context)
    first, events[:] = events[:], []
    with late_gathers(events), replay_topk(module, record), torch.no_grad():
        forward(module, inputs, fresh(context))
    return first, events


def in_flight(case: Case, rank: int) -> bool:
    """Two micro-batches, one after the other, or both in flight and recomputed: equal to every bit."""
    made = make_rank(case, rank)
    if made is None:
        return True
    module, inputs, context = made
    batches = [inputs, {name: x.flip(0) for name, x in inputs.items()}]

    def train(interleaved: bool) -> list[Tensor]:
        module.zero_grad()
        leaves, losses = [], []
        for batch in batches:
            leaf = batch | {name: batch[name].clone().requires_grad_() for name in ("query", "key")}
            leaves.append(leaf)
            if interleaved:
                out = checkpoint(forward, module, leaf, fresh(context), use_reentrant=False)
            else:
                out = forward(module, leaf, fresh(context))
            losses.append((out * batch["dout"].flatten(1)).sum())
            if not interleaved:
                losses[-1].backward()
        for loss in losses if interleaved else ():
            loss.backward()
        found = [x.grad for leaf in leaves for x in (leaf["query"], leaf["key"])]
        return [x for x in (*found, *(p.grad for p in module.parameters())) if x is not None]

    with late_gathers([]):
        wanted, got = train(False), train(True)
    return len(got) == len(wanted) > 4 and all(
        x.abs().sum() > 0 and torch.equal(x, y) for x, y in zip(wanted, got, strict=True)
    )


def let_go() -> bool:
    """Whether what was sent and received is held no longer than until it is waited for."""
    rows = start_gather_rows(torch.ones(2, 3), dist.group.WORLD)
    assert rows._under_way is not None
    seen = [weakref.ref(x) for x in rows._under_way[1:]]
    assert rows.wait().shape == (2 * WORLD, 3)
    for _ in range(100):  # the threads of Gloo let go when they get to it
        if all(x() is None for x in seen):
            return True
        time.sleep(0.05)
    return False


# ---- mistakes ----


_wait = RowsInFlight.wait


def reads_at_once(self: RowsInFlight) -> Tensor:
    """Reads latent keys without waiting for them."""
    if self._under_way is not None and self._x.shape[1] == WIDTH:
        self._under_way = Late(lambda: None), *self._under_way[1:]
    return _wait(self)


def blind(case: Case, rank: int) -> str:
    with patch.object(RowsInFlight, "wait", reads_at_once), late_gathers([]):
        return complaint(case, rank)


def complaint(case: Case, rank: int) -> str:
    try:
        check(case, rank)
    except AssertionError as error:
        return str(error) or "differs"
    return ""


_gather_keys = RowShards.gather_keys


def waits_at_once(self: RowShards, *args: Any) -> Any:
    """Waits for the latent keys before the indexer scores."""
    kv, operands = _gather_keys(self, *args)
    return KeysInFlight(start_gather_rows(kv.wait(), None), None), operands


class StartsLate:
    """Starts to gather when the rows are needed."""

    def __init__(self, x: Tensor, group: Any) -> None:
        self.arguments = x, group

    def wait(self) -> Tensor:
        return start_gather_rows(*self.arguments).wait()


def on_rank() -> dict[str, Any]:
    rank, results = dist.get_rank(), {}
    with late_gathers([]):
        results["let go"] = let_go()
    for case in CASES:
        results[f"{case} orders"] = orders(case, rank)
        results[f"{case} in flight"] = in_flight(case, rank)
        with late_gathers([]):
            results[f"{case} late"] = complaint(case, rank)
    for case in (CP, TP_SP, BOTH):
        results[f"{case} blind"] = blind(case, rank)
        with patch.object(RowShards, "gather_keys", waits_at_once):
            results[f"{case} waits at once"] = orders(case, rank)
        with patch.object(context_parallel, "start_gather_rows", StartsLate):
            results[f"{case} starts late"] = orders(case, rank)
    return results


@cache
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, on_rank)


def of_case(case: Case, what: str) -> list[Any]:
    """The results of the ranks that ran ``case``."""
    return [results[f"{case} {what}"] for results in ranks()[: case.tp * case.cp]]


def test_the_indexer_scores_while_latent_keys_travel() -> None:
    for case in CASES:
        assert of_case(case, "orders") == [(ORDERS[case], REPLAYED[case])] * (case.tp * case.cp), case


def test_keys_are_read_after_they_arrived() -> None:
    for case in CASES:
        assert of_case(case, "late") == [""] * (case.tp * case.cp), case


def test_micro_batches_in_flight_and_recomputed_keep_every_bit() -> None:
    for case in CASES:
        assert all(of_case(case, "in flight")), case


def test_rows_that_arrived_are_held_no_longer() -> None:
    assert all(results["let go"] for results in ranks())


def test_the_checks_notice_mistakes() -> None:
    for case in (CP, TP_SP, BOTH):
        assert all(of_case(case, "blind")), "keys were read before they arrived, and nothing differed"
        for mistake in ("waits at once", "starts late"):
            assert all(first != ORDERS[case] for first, _ in of_case(case, mistake)), mistake


def test_one_process_gets_its_own_tensors_back() -> None:
    keys = torch.zeros(3, 2, requires_grad=True)
    context = ForwardContext.build(1, 3, None, "cpu")
    kv, operands = RowShards().gather_keys(keys, None, context)
    assert kv.wait() is keys and operands is None


# ---- how evenly rows are shared out ----


def count(layout: Layout, start: int, stop: int) -> int:
    """Pairs of rows ``[start, stop)``, row by row."""
    return sum(s.causal_offset + r - s.row_start + 1 for s in layout.segments for r in range(start, stop)
               if s.row_start <= r < s.row_stop)  # fmt: skip


def test_pairs_of_small_layouts() -> None:
    assert pairs_by_rank(Layout.causal(1, 4), 1) == (10,)
    assert pairs_by_rank(Layout.causal(1, 4), 2) == (3, 7)
    assert pairs_by_rank(Layout.causal(2, 4), 2) == (10, 10)
    assert pairs_by_rank(Layout.zigzag((0, 8), 2, 0), 2) == (1 + 2, 7 + 8)
    assert pairs_by_rank(Layout.zigzag((0, 8), 2, 1), 2) == (3 + 4, 5 + 6)
    assert pairs_by_rank(Layout.packed((0, 1, 1), (0, 2, 6)), 3) == (1, 0, 0)


def test_pairs_are_those_of_each_row() -> None:
    for cp_size in (1, 2):
        for layout in (Layout.zigzag(REAL, cp_size, rank, PADDED) for rank in range(cp_size)):
            share = layout.num_rows // 4
            assert pairs_by_rank(layout, 4) == tuple(count(layout, r * share, (r + 1) * share) for r in range(4))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_last_rank_of_a_long_document_works_most(ranks: int) -> None:
    pairs = pairs_by_rank(Layout.causal(1, 1 << 16), ranks)
    assert pairs[-1] / pairs[0] == pytest.approx(2 * ranks - 1, rel=1e-3)
    assert pairs[-1] * ranks / sum(pairs) == pytest.approx((2 * ranks - 1) / ranks, rel=1e-3)


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows do not split over 2 ranks: pad them"):
        pairs_by_rank(Layout.causal(1, 5), 2)
