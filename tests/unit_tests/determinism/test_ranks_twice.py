"""Two ranks that share a model compute the same losses and gradients twice, bit for bit."""

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from tests.ranks import run_on_ranks
from tests.unit_tests.core.tiny_model import gradients, tiny_config

MODES = {
    "tensor and expert": ParallelSizes(2, tensor=2, expert=2),
    "expert": ParallelSizes(2, expert=2),
}


def runs(names: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    """Each mode's gradients and losses of two runs from one state, on this rank."""
    torch.use_deterministic_algorithms(True)
    results = {}
    for name in names:
        sizes = MODES[name]
        config = tiny_config(
            tensor_model_parallel_size=sizes.tensor,
            expert_model_parallel_size=sizes.expert,
            sequence_parallel=sizes.tensor > 1,
            vocab_size=64,
        )
        groups = build_process_groups(sizes, "cpu")
        torch.manual_seed(7)
        model = build_gpt_model(config, pg_collection=groups).train()
        tokens = torch.randint(
            64, (2, 12), generator=torch.Generator().manual_seed(groups.dp.rank() if groups.dp else 0)
        )
        results[name] = [_run(model, tokens) for _ in range(2)]
    return results


def _run(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    losses = model(tokens, labels=tokens.roll(-1, 1))
    losses.sum().backward()
    return {"losses": losses.detach().clone(), **gradients(model)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[dict[str, Tensor]]]]:
    return run_on_ranks(2, runs, list(MODES))


@pytest.mark.parametrize("mode", MODES)
def test_shared_models_repeat_their_gradients(mode: str, ranks: list[dict[str, list[dict[str, Tensor]]]]) -> None:
    for rank in ranks:
        first, second = rank[mode]
        assert first.keys() == second.keys() and len(first) > 20
        assert [name for name in first if not torch.equal(first[name], second[name])] == []
