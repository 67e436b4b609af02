"""Each option that is out of its range is refused by a sentence that names it."""

import pytest

from megatron.training.config import (
    CheckpointConfig,
    DistributedConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)

REFUSED = [
    (TrainingConfig, {"micro_batch_size": 0}, "--micro-batch-size is 0"),
    (TrainingConfig, {"global_batch_size": -1}, "--global-batch-size is -1"),
    (TrainingConfig, {"train_iters": 0}, "--train-iters is 0"),
    (TrainingConfig, {"exit_interval": 0}, "--exit-interval is 0"),
    (TrainingConfig, {"exit_duration_in_mins": 0.0}, "--exit-duration-in-mins is 0.0"),
    (ValidationConfig, {"eval_iters": -1}, "--eval-iters is -1"),
    (ValidationConfig, {"eval_interval": 0}, "--eval-interval is 0"),
    (OptimizerConfig, {"lr": 0.0}, "--lr is 0.0"),
    (OptimizerConfig, {"lr": float("inf")}, "--lr is inf"),
    (OptimizerConfig, {"weight_decay": float("inf")}, "--weight-decay is inf"),
    (OptimizerConfig, {"lr_decay_iters": 0}, "--lr-decay-iters is 0"),
    (OptimizerConfig, {"adam_eps": 0.0}, "--adam-eps is 0.0"),
    (OptimizerConfig, {"min_lr": -1.0}, "--min-lr is -1.0"),
    (OptimizerConfig, {"lr_warmup_init": -1.0}, "--lr-warmup-init is -1.0"),
    (OptimizerConfig, {"lr_warmup_iters": -1}, "--lr-warmup-iters is -1"),
    (OptimizerConfig, {"weight_decay": -1.0}, "--weight-decay is -1.0"),
    (OptimizerConfig, {"clip_grad": -1.0}, "--clip-grad is -1.0"),
    (OptimizerConfig, {"adam_beta1": 1.0}, "--adam-beta1 is 1.0"),
    (OptimizerConfig, {"adam_beta2": -0.1}, "--adam-beta2 is -0.1"),
    (OptimizerConfig, {"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction is 1.0"),
    (OptimizerConfig, {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "both say how long warm-up is"),
    (OptimizerConfig, {"lr": 1.0, "min_lr": 2.0}, "--min-lr 2.0 is above --lr 1.0"),
    (CheckpointConfig, {"save": "x", "save_interval": 0}, "--save-interval is 0"),
    (CheckpointConfig, {"load": "x", "ckpt_step": -1}, "--ckpt-step is -1"),
    (CheckpointConfig, {"save_interval": 3}, "--save-interval 3 has nowhere to save to"),
    (CheckpointConfig, {"save": "x", "save_retain_interval": 0}, "--save-retain-interval is 0"),
    (CheckpointConfig, {"save_retain_interval": 4}, "--save-retain-interval 4 has no checkpoints to keep"),
    (
        CheckpointConfig,
        {"save": "x", "save_interval": 3, "save_retain_interval": 4},
        "--save-retain-interval 4 is no multiple of --save-interval 3",
    ),
    (CheckpointConfig, {"ckpt_step": 3}, "--ckpt-step has nothing to load"),
    (CheckpointConfig, {"finetune": True}, "--finetune has nothing to load"),
    (LoggingConfig, {"log_interval": 0}, "--log-interval is 0"),
    (LoggingConfig, {"tensorboard_log_interval": 0}, "--tensorboard-log-interval is 0"),
    (LoggingConfig, {"dsa_log_mass_rows": 0}, "--dsa-log-mass-rows is 0"),
    (LoggingConfig, {"dsa_log_mass_interval": -1}, "--dsa-log-mass-interval is -1"),
    (DistributedConfig, {"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes is 0"),
]


@pytest.mark.parametrize(("cls", "values", "piece"), REFUSED, ids=[piece for _, _, piece in REFUSED])
def test_a_value_out_of_range_is_refused(cls: type, values: dict[str, object], piece: str) -> None:
    with pytest.raises(ValueError, match=r"^.*\.$") as refusal:
        cls(**values)
    assert piece in str(refusal.value)


@pytest.mark.parametrize(
    "cls", [TrainingConfig, ValidationConfig, OptimizerConfig, CheckpointConfig, LoggingConfig, DistributedConfig]
)
def test_defaults_are_accepted(cls: type) -> None:
    cls()


def test_defaults_are_megatrons() -> None:
    optimizer, validation, logging = OptimizerConfig(), ValidationConfig(), LoggingConfig()
    assert (optimizer.weight_decay, optimizer.adam_beta1, optimizer.adam_beta2) == (0.01, 0.9, 0.999)
    assert (optimizer.adam_eps, optimizer.clip_grad, optimizer.min_lr) == (1e-8, 1.0, 0.0)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters) == ("linear", 0)
    assert (validation.eval_iters, validation.eval_interval) == (100, 1000)
    assert (logging.log_interval, logging.tensorboard_log_interval) == (100, 1)
