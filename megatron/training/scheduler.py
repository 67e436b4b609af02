"""Learning-rate schedule: a pure function of the step.

Nothing is saved for it: a resumed run computes the same rate from the same flags, and flags that change at a resume
take effect at once. As in Megatron-LM, the first step uses the rate of zero finished steps, so with warm-up from 0
it moves no weight.
"""

from __future__ import annotations

import math

from megatron.training.config import OptimizerConfig


def warmup_iters(config: OptimizerConfig, decay_iters: int) -> int:
    """Steps of linear warm-up."""
    if config.lr_warmup_fraction is None:
        return config.lr_warmup_iters
    return int(config.lr_warmup_fraction * decay_iters)


def learning_rate(config: OptimizerConfig, finished_steps: int, train_iters: int) -> float:
    """Rate of the step that follows ``finished_steps`` steps, in a run of ``train_iters``."""
    assert config.lr is not None
    decay_iters = config.lr_decay_iters or train_iters
    warmup = warmup_iters(config, decay_iters)
    if warmup > 0 and finished_steps <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * finished_steps / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if finished_steps > decay_iters:
        return config.min_lr
    done = (finished_steps - warmup) / max(decay_iters - warmup, 1)
    share = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return config.min_lr + share * (config.lr - config.min_lr)
