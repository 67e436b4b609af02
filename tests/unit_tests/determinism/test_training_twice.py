"""Whatever deterministic mode accepts trains twice to equal weights, optimizer state and figures, bit for bit."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.shards import local_part
from megatron.training.arguments import parse_args
from megatron.training.pretrain_gpt import start
from megatron.training.validate import require_kernels
from tests.functional_tests.runs import DATA, INDEXER_LOSS, MODEL, TRAINING, figures

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = {
    "sparse loss": INDEXER_LOSS,
    "frozen indexer": [],
    "shared selection and recompute": [
        *INDEXER_LOSS, "--dsa-indexer-topk-freq", "2", "--recompute-granularity", "full",
    ],
    "dense loss, packed documents": [
        "--dsa-indexer-loss-coeff", "1", "--reset-attention-mask", "--calculate-per-token-loss",
    ],
    "FP32 rope, balancing loss": [
        *INDEXER_LOSS, "--dsa-indexer-rope-fp32", "--dsa-indexer-rope-table-dtype", "fp32",
        "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def restore_determinism() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def train(folder: Path, device: str, options: list[str]) -> dict[str, Tensor]:
    """Weights and optimizer state after some steps, as this process holds them."""
    line = [*MODEL, *DATA, *TRAINING, *options, "--bf16", "--device", device, "--train-iters", "3", "--eval-iters", "0"]
    line += ["--deterministic-mode", "--log-dir", str(folder)]
    with ExitStack() as stack:
        trainer = start(parse_args(line), stack)
        assert trainer.run() == 0
    tensors = dict(trainer.engine.model.state_dict())
    for number, state in trainer.engine.optimizer.state_dict()["state"].items():
        tensors.update({f"{number}.{name}": value for name, value in state.items()})
    return {name: local_part(tensor).detach().clone() for name, tensor in tensors.items()}


def unequal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    bits = {name: (a.contiguous().view(-1), second[name].contiguous().view(-1)) for name, a in first.items()}
    return [name for name, (a, b) in bits.items() if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_two_runs_are_equal(tmp_path: Path, device: str, options: list[str]) -> None:
    first, second = (train(tmp_path / name, device, options) for name in ("first", "second"))
    assert torch.are_deterministic_algorithms_enabled()
    assert unequal(first, second) == []
    assert figures(tmp_path / "first") == figures(tmp_path / "second") and len(figures(tmp_path / "first")) >= 3


def test_another_seed_is_noticed(tmp_path: Path) -> None:
    first = train(tmp_path / "first", "cpu", INDEXER_LOSS)
    second = train(tmp_path / "second", "cpu", [*INDEXER_LOSS, "--seed", "4321"])
    assert len(unequal(first, second)) > 10


@pytest.mark.parametrize(("options", "kernel"), [([], "sparse_attention_backward"), (INDEXER_LOSS, "indexer_backward")])
def test_kernels_that_cannot_repeat_are_refused_before_the_first_step(options: list[str], kernel: str) -> None:
    config = parse_args([*MODEL, *DATA, *options, "--dsa-kernel-backend", "cudnn", "--deterministic-mode"])
    with pytest.raises(ValueError, match=f"deterministic_mode=True cannot train .*{kernel}"):
        require_kernels(config.model, torch.device("cpu"))
