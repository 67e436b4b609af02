"""Shared experts that run while rows travel: the order of events both ways, and the same numbers bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import group_rank
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import exchange
from tests.ranks import run_on_ranks
from tests.unit_tests.core.tiny_model import gradients, tiny_config

SIZES: dict[str, ParallelSizes] = {
    "ep": ParallelSizes(2, expert=2),
    "tp-ep": ParallelSizes(2, tensor=2, expert=2),
    "tp-sp-ep": ParallelSizes(2, tensor=2, expert=2),
}
RECOMPUTE = {"kept": None, "recomputed": "full"}
# A document of 5 rows and one of 4, with padding between them and behind.
PADDED = PackedSeqParams.from_offsets((0, 5, 9), (0, 7, 12))


class _Spied:
    """An all-to-all that notes when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


def spied(real: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return real(*args, **kwargs)  # the counts
        events.append("start")
        return _Spied(real(*args, **kwargs), events)

    return all_to_all


def run(mode: str, recompute: str | None, overlap: bool, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Losses and gradients of one pass of a model with one expert layer, and what happened in which order."""
    sizes = SIZES.get(mode, ParallelSizes(1))
    config = tiny_config(
        num_layers=2,
        vocab_size=64,
        tensor_model_parallel_size=sizes.tensor,
        expert_model_parallel_size=sizes.expert,
        sequence_parallel="sp" in mode,
        recompute_granularity=recompute,
        moe_shared_expert_overlap=overlap,
    )
    torch.manual_seed(7)
    model = build_gpt_model(config, pg_collection=groups).train()
    (shared,) = (m for name, m in model.named_modules() if isinstance(m, MLP) and name.endswith("shared_experts"))
    events: list[str] = []
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.register_full_backward_hook(lambda *_: events.append("shared"))
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(group_rank(groups.dp)))
    with mock.patch.object(exchange.dist, "all_to_all_single", spied(dist.all_to_all_single, events)):
        loss = model(tokens, labels=tokens.roll(-1, 1), packed_seq_params=PADDED)
        forward, events[:] = list(events), []
        loss.sum().backward()
    return {"tensors": {"loss": loss.detach(), **gradients(model)}, "forward": forward, "backward": events}


Found = dict[tuple[str, str, bool], dict[str, Any]]


def all_cases() -> Found:
    results = {}
    for mode, sizes in SIZES.items():
        groups = build_process_groups(sizes, "cpu")
        for name, recompute in RECOMPUTE.items():
            for overlap in (False, True):
                results[mode, name, overlap] = run(mode, recompute, overlap, groups)
    return results


@cache
def on_ranks() -> list[Found]:
    return run_on_ranks(2, all_cases)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and len(actual) > 20
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("mode", SIZES)
def test_the_overlap_changes_no_bit(mode: str, recompute: str) -> None:
    for rank in on_ranks():
        apart = rank[mode, "kept", False]["tensors"]
        assert_equal(rank[mode, recompute, True]["tensors"], apart)
        assert_equal(rank[mode, recompute, False]["tensors"], apart)


# Inputs, then router weights, go to the experts; outputs come back.
APART = ["start", "start", "wait", "wait", "start", "wait", "shared"]
OVERLAPPED = ["start", "start", "shared", "wait", "wait", "start", "wait"]


@pytest.mark.parametrize("mode", SIZES)
def test_shared_experts_run_while_rows_travel(mode: str) -> None:
    for rank in on_ranks():
        for overlap, order in ((False, APART), (True, OVERLAPPED)):
            kept, recomputed = (rank[mode, name, overlap] for name in RECOMPUTE)
            assert kept["forward"] == recomputed["forward"] == order
            assert kept["backward"] == recomputed["backward"][-len(order) :] == wanted_backward(overlap)
            rerun = recomputed["backward"][: -len(order)]  # which may end before the last shared rows are summed
            assert rerun == order[: len(rerun)] and len(rerun) >= len(order) - 1


def wanted_backward(overlap: bool) -> list[str]:
    """Gradients of outputs travel first; then those of weights and inputs, started before either is waited for."""
    outputs, inputs = ["start", "wait"], ["start", "start", "wait", "wait"]
    return [*outputs, *inputs[:2], "shared", *inputs[2:]] if overlap else ["shared", *outputs, *inputs]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_one_process_has_nothing_to_overlap(recompute: str) -> None:
    groups = ProcessGroupCollection()
    apart, overlapped = (run("", RECOMPUTE[recompute], overlap, groups) for overlap in (False, True))
    assert_equal(overlapped["tensors"], apart["tensors"])
    assert apart["forward"] == overlapped["forward"] == ["shared"]
