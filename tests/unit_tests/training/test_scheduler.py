"""The learning rate at every kind of place of a schedule, by hand."""

import pytest

from megatron.training.config import OptimizerConfig
from megatron.training.scheduler import learning_rate, warmup_iters


def rates(config: OptimizerConfig, steps: list[int], train_iters: int = 100) -> list[float]:
    return [learning_rate(config, step, train_iters) for step in steps]


def test_warmup_starts_from_its_own_rate_and_ends_at_the_largest() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_iters=10, lr_warmup_init=0.2, lr_decay_style="constant")
    assert rates(config, [0, 5, 10, 11, 99]) == pytest.approx([0.2, 0.6, 1.0, 1.0, 1.0])


def test_without_warmup_the_first_step_has_the_largest_rate() -> None:
    assert rates(OptimizerConfig(lr=2.0), [0]) == [2.0]


@pytest.mark.parametrize(
    ("style", "expected"), [("linear", [1.0, 0.775, 0.55, 0.1]), ("cosine", [1.0, 0.8681981, 0.55, 0.1])]
)
def test_decay_runs_from_the_end_of_warmup_to_lr_decay_iters(style: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=20, lr_decay_iters=60)
    assert rates(config, [20, 30, 40, 60]) == pytest.approx(expected)
    assert rates(config, [61, 99]) == [0.1, 0.1]


def test_decay_lasts_the_whole_run_by_default() -> None:
    config = OptimizerConfig(lr=1.0, lr_decay_style="linear")
    assert rates(config, [50], train_iters=100) == [0.5]
    assert rates(config, [50], train_iters=200) == [0.75]


def test_warmup_as_a_share_of_the_decay() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1)
    assert warmup_iters(config, 50) == 5
    assert rates(config, [5], train_iters=100) == [0.5]
