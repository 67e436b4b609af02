"""Training over two ranks in other orders than one micro-batch after the other, and with parts of the model frozen.

One test spawns two Gloo processes, which run everything; what they return is compared here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.functional_tests import parallel_runs as runs
from tests.functional_tests.parallel_runs import Case
from tests.ranks import run_on_ranks

# Without experts and sequence parallelism, the indexers' gradients are the only partial ones, so a frozen indexer
# leaves none to sum.
WITHOUT_EXPERTS = {"num_moe_experts": None, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None}
WITHOUT_EXPERTS |= {"moe_router_enable_expert_bias": False}


def run_all() -> dict[str, Any]:
    return {"frozen": runs.frozen_indexer(Case(2, tp=2), **WITHOUT_EXPERTS)}


@cache
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, run_all)


def check_a_model_whose_partial_gradients_are_all_frozen_trains() -> None:
    for results in on_ranks():
        assert results["frozen"] == {"trained": 0, "changed": 0, "others": True}


def test_two_processes() -> None:
    check_a_model_whose_partial_gradients_are_all_frozen_trains()
