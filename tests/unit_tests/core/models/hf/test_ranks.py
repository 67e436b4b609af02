"""Golden checkpoints over tensor-, expert- and data-parallel ranks: each fills its parts, and the logits are golden."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.hf import config_from_folder, load_hf_weights
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.training.prepare import build_model
from tests.ranks import run_on_ranks

from .golden import FIXTURES, tensors

NAME = "b_glm_indexshare"
CASES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep2": {"expert_model_parallel_size": 2},
    "dp2": {},
}


def logits_on_a_rank() -> dict[str, Tensor]:
    found = {}
    for name, sizes in CASES.items():
        config = config_from_folder(FIXTURES / NAME, dsa_indexer_scoring_precision="fp32")
        config = dataclasses.replace(config, **sizes)
        groups = build_process_groups(ParallelSizes.of(config, 2), "cpu")
        model, compute = build_model(config, groups, torch.device("cpu"))
        load_hf_weights(model, FIXTURES / NAME)
        model.eval()
        with torch.no_grad(), compute.installed():
            found[name] = model(tensors(NAME, "inputs")["input_ids"])
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Tensor]]:
    return run_on_ranks(2, logits_on_a_rank)


@pytest.mark.parametrize("case", CASES)
def test_sharded_models_give_the_golden_logits(case: str, results: list[dict[str, Tensor]]) -> None:
    golden = tensors(NAME, "outputs")["logits"]
    for found in results:
        assert (found[case] - golden).abs().max() < 5e-4
