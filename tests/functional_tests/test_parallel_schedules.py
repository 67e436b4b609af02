"""Over two ranks: micro-batches in flight, selections replayed, and parts of the model frozen.

One test spawns two Gloo processes, which run everything; what they return is compared here. The middle layer reuses the
first one's selection, so a recompute that read another micro-batch's would attend to other keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.mappings import group_rank, group_size
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker, record_topk, replay_topk
from megatron.training.data.batch import Batch
from megatron.training.data.shard import shard_batch
from megatron.training.step import Engine
from tests.functional_tests import parallel_runs as runs
from tests.functional_tests.parallel_runs import Case
from tests.ranks import run_on_ranks

IN_FLIGHT = [
    Case(2, micro=1),
    Case(2, tp=2, sp=True, micro=1),
    Case(2, cp=2, packed=True, micro=1),
]
REPLAYED = [Case(2, tp=2), Case(2, tp=2, sp=True, packed=True, dense=True), Case(2, cp=2), Case(2, cp=2, packed=True)]
# Without experts and sequence parallelism, the indexers' gradients are the only partial ones, so a frozen indexer
# leaves none to sum.
WITHOUT_EXPERTS = {"num_moe_experts": None, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None}
WITHOUT_EXPERTS |= {"moe_router_enable_expert_bias": False}
MICRO_BATCHES = 4

Gradients = dict[str, Tensor]


def run_all() -> dict[str, Any]:
    results: dict[str, Any] = {f"in flight {case}": in_flight(case) for case in IN_FLIGHT}
    results |= {f"replayed {case}": replayed(case) for case in REPLAYED}
    return results | {"frozen": runs.frozen_indexer(Case(2, tp=2), **WITHOUT_EXPERTS)}


@cache
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, run_all)


def forward(engine: Engine, batch: Batch) -> Tensor:
    """The loss of one micro-batch, with the indexer's attached to it."""
    cp, tp = engine.groups.cp, engine.groups.tp
    part = shard_batch(batch, group_size(cp), group_rank(cp), group_size(tp))
    losses = LossTracker(normalizer=10.0)
    loss = engine.model(part.tokens, labels=part.labels, packed_seq_params=part.packed_seq_params, losses=losses)
    return (loss * part.loss_mask).sum()


def gradients(engine: Engine) -> Gradients:
    engine.compute.finish()
    return {name: runs.whole(p.grad) for name, p in engine.model.named_parameters() if p.grad is not None}


def one_after_the_other(case: Case, batches: Sequence[Batch]) -> Gradients:
    engine = runs.make_engine(case)
    engine.model.train()
    with engine.compute.installed():
        for batch in batches:
            forward(engine, batch).backward()
            engine.compute.accumulate()
    return gradients(engine)


def in_flight(case: Case) -> dict[str, Gradients]:
    """Gradients of pairs of micro-batches in the order F1 F2 B1 B2, with an evaluation between, and in turn."""
    engine = runs.make_engine(replace(case, recompute=True))
    batches = runs.micro_batches(case, engine)[:MICRO_BATCHES]
    engine.model.train()
    for first in range(0, MICRO_BATCHES, 2):
        pending = [forward(engine, batch) for batch in batches[first : first + 2]]
        with torch.no_grad():
            forward_without_training(engine, batches[first - 1])
        for loss in pending:
            loss.backward()
    return {"in flight": gradients(engine), "in turn": one_after_the_other(case, batches)}


def forward_without_training(engine: Engine, batch: Batch) -> None:
    engine.model.eval()
    forward(engine, batch)
    engine.model.train()


def replayed(case: Case) -> dict[str, Gradients]:
    """Gradients with the keys that a model of other weights selects, and with those that it selects itself."""
    batch = runs.collate([runs.make_sample(case, number) for number in range(case.micro)])
    other = runs.make_engine(case, seed=1)
    with torch.no_grad(), record_topk(other.model) as foreign, other.compute.installed():
        other.model.eval()
        forward(other, batch)
    results = {"plain": one_after_the_other(case, [batch])}
    for name in ("own", "foreign"):
        engine = runs.make_engine(case if case.world == 1 else replace(case, recompute=True))
        engine.model.train()
        with engine.compute.installed():
            record = foreign
            if name == "own":
                with record_topk(engine.model) as record:
                    forward(engine, batch).backward()
                engine.compute.accumulate()
                results["recorded"] = gradients(engine)
                engine.optimizer.zero_grad()
            with replay_topk(engine.model, record):
                loss = forward(engine, batch)
            loss.backward()
            engine.compute.accumulate()
        results[name] = gradients(engine)
    return results


def difference(got: Gradients, wanted: Gradients) -> float:
    assert got.keys() == wanted.keys() and sum(".indexer." in name for name in wanted) == 10
    return max(float((got[name] - gradient).norm() / gradient.norm()) for name, gradient in wanted.items())


def check_micro_batches_in_flight_train_what_they_train_in_turn(case: Case) -> None:
    data_parallel = case.world // (case.tp * case.cp)
    samples = range(MICRO_BATCHES * data_parallel)
    batches = [runs.collate([runs.make_sample(case, number)]) for number in samples]
    wanted = one_after_the_other(case.alone, batches)
    for results in on_ranks():
        got = results[f"in flight {case}"]
        assert difference(got["in flight"], got["in turn"]) < 1e-5
        assert difference(got["in flight"], wanted) < 1e-5


def check_replay_trains_with_the_recorded_keys(case: Case) -> None:
    wanted = replayed(case.alone)
    assert difference(wanted["foreign"], wanted["plain"]) > 1e-2, "the other model selects other keys"
    for results in on_ranks():
        got = results[f"replayed {case}"]
        for name, others in wanted.items():
            assert difference(got[name], others) < 1e-5, name
        for name in ("recorded", "own"):
            assert difference(got[name], got["plain"]) < 1e-5, name


def check_a_model_whose_partial_gradients_are_all_frozen_trains() -> None:
    for results in on_ranks():
        assert results["frozen"] == {"trained": 0, "changed": 0, "others": True}


def test_two_processes() -> None:
    for case in IN_FLIGHT:
        print(f"in flight: {case}")  # pytest shows it where a check fails
        check_micro_batches_in_flight_train_what_they_train_in_turn(case)
    for case in REPLAYED:
        print(f"replayed: {case}")
        check_replay_trains_with_the_recorded_keys(case)
    check_a_model_whose_partial_gradients_are_all_frozen_trains()


@pytest.mark.parametrize("case", IN_FLIGHT, ids=str)
def test_each_micro_batch_selects_other_keys(case: Case) -> None:
    """What is compared could differ: the micro-batches in flight do not see the same keys."""
    engine = runs.make_engine(case.alone)
    records = []
    for number in range(2):
        with torch.no_grad(), record_topk(engine.model) as record, engine.compute.installed():
            engine.model.eval()
            forward(engine, runs.collate([runs.make_sample(case, number)]))
        records.append(record[1].indices_TK)
    assert not torch.equal(*records)
