"""Training over ranks against one process: the balance loss, overlapped shared experts, the mass, no rotary part.

One spawn of two processes and one of four run all cases; gradients are compared after a whole step, as sharded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron.training.attention_mass import MassProbe
from megatron.training.step import evaluate, train_step
from tests.functional_tests import parallel_runs as runs
from tests.functional_tests.parallel_runs import Case
from tests.ranks import run_on_ranks

CASES = [
    Case(2, tp=2, ep=2, micro=8, per_token=True),
    Case(2, tp=2, sp=True, packed=True, recompute=True),
    Case(2, cp=2, ep=2, micro=4),
    Case(2, cp=2, packed=True),
    Case(2, tp=2, sp=True, unrotated=True),
    Case(2, cp=2, packed=True, unrotated=True),
    Case(4, tp=2, cp=2, ep=2),
    Case(4, tp=2, sp=True, cp=2, packed=True, ep=4, recompute=True),
    Case(4, cp=4, packed=True, per_token=True, micro=8),
]
SAMPLED = (2, 1000)


def observe(case: Case) -> dict[str, Any]:
    """Gradients of one step, and masses of a few and of all rows, in training and in evaluation."""
    balance = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
    engine = runs.make_engine(case, moe_shared_expert_overlap=True, **balance)
    batches = runs.micro_batches(case, engine)
    masses = {}
    for rows in SAMPLED:
        masses["evaluated", rows] = evaluate(engine, batches, MassProbe(rows))[1]
        step = train_step(engine, batches, 0.0, MassProbe(rows))
        masses["trained", rows] = step.attention_mass
    gradients = {name: runs.whole(p.grad) for name, p in engine.model.named_parameters() if p.grad is not None}
    return {"masses": masses, "gradients": gradients, "losses": (step.indexer_losses, step.balance_losses)}


def observe_all(world: int) -> dict[str, Any]:
    return {str(case): observe(case) for case in CASES if case.world == world}


@cache
def on_ranks(world: int) -> list[dict[str, Any]]:
    return run_on_ranks(world, observe_all, world)


@cache
def alone(case: Case) -> dict[str, Any]:
    return observe(case.alone)


def named(world: int) -> Any:
    return pytest.mark.parametrize("case", [case for case in CASES if case.world == world], ids=str)


def check_gradients(case: Case) -> None:
    wanted = alone(case)["losses"]
    assert [sorted(losses) for losses in wanted] == [[1, 3], [2, 3]]
    for rank in on_ranks(case.world):
        for got, losses in zip(rank[str(case)]["losses"], wanted, strict=True):
            assert got == pytest.approx(losses, rel=1e-5)
    wanted = alone(case)["gradients"]
    for rank in on_ranks(case.world):
        got = rank[str(case)]["gradients"]
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = (got[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, (name, float(error))


def check_masses(case: Case) -> None:
    wanted = alone(case)["masses"]
    assert all(0 < mass < 1 for masses in wanted.values() for mass in masses.values())
    assert wanted["trained", SAMPLED[0]] != wanted["trained", SAMPLED[1]]
    for rank in on_ranks(case.world):
        for key, masses in rank[str(case)]["masses"].items():
            assert masses == pytest.approx(wanted[key], rel=1e-5), key


@named(2)
def test_two_ranks_balance_what_one_process_balances(case: Case) -> None:
    check_gradients(case)


@named(2)
def test_two_ranks_measure_the_mass_of_one_process(case: Case) -> None:
    check_masses(case)


@named(4)
def test_four_ranks_balance_what_one_process_balances(case: Case) -> None:
    check_gradients(case)


@named(4)
def test_four_ranks_measure_the_mass_of_one_process(case: Case) -> None:
    check_masses(case)


def test_the_balance_loss_moves_the_router() -> None:
    """So that the gradients above say something about it."""
    engine = runs.make_engine(CASES[0].alone)
    train_step(engine, runs.micro_batches(CASES[0].alone, engine), 0.0)
    for name, parameter in engine.model.named_parameters():
        if name.endswith("router.weight"):
            with_loss = alone(CASES[0])["gradients"][name]
            assert parameter.grad is not None
            assert (with_loss - parameter.grad).norm() > 0.01 * with_loss.norm()
