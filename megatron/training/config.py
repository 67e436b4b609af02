"""What a training run is told, besides the model and the data: flat dataclasses under Megatron-LM's flag names.

The command line is generated from these classes (``arguments.py``), so a field is a flag, and the string under it
is the flag's help. Defaults are Megatron's; flags that Megatron lacks are marked "(not in Megatron)". Checks of one
class live in its ``__post_init__``; checks across classes live in ``validate.py``. No torch here: ``--help`` stays
fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        flag = "--" + name.replace("_", "-")
        _require(value is None or value > 0, f"{flag} is {value}: give a positive number.")


@dataclass
class TrainingConfig:
    """Batch sizes and length of the run."""

    micro_batch_size: int | None = None
    """Samples of one forward and backward pass."""
    global_batch_size: int | None = None
    """Samples of one optimizer step, a multiple of the micro batch size; one micro batch when unset."""
    train_iters: int | None = None
    """Optimizer steps of the whole run, counted from its first start and not from a resume."""
    exit_interval: int | None = None
    """Save and stop at each step that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop after the first step that ends later than this many minutes after the start."""
    skip_train: bool = False
    """Evaluate, and train nothing."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop, before the weights change, at the first loss or gradient that is not finite."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "micro_batch_size", "global_batch_size", "train_iters", "exit_interval", "exit_duration_in_mins"
        )


@dataclass
class ValidationConfig:
    """Evaluation on held-out samples; every evaluation of a run sees the same ones."""

    eval_iters: int = 100
    """Global batches of one evaluation; 0 evaluates nothing."""
    eval_interval: int | None = 1000
    """Steps between evaluations; None leaves the one at the end of the run."""

    def __post_init__(self) -> None:
        _require(self.eval_iters >= 0, f"--eval-iters is {self.eval_iters}: give 0 or a positive number.")
        _require_positive(self, "eval_interval")


@dataclass
class OptimizerConfig:
    """AdamW, its learning-rate schedule, and gradient clipping."""

    optimizer: Literal["adam"] = "adam"
    """Adam with decoupled weight decay; the one optimizer this package has."""
    lr: float | None = None
    """Largest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the schedule after warm-up."""
    lr_decay_iters: int | None = None
    """Steps until min_lr is reached; train_iters when unset."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of lr_decay_iters, instead of lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up, which is what the first step uses."""
    weight_decay: float = 0.01
    """Weight decay of matrices; vectors (norm weights, biases) have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the denominator of the update."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float):
                _require(math.isfinite(value), f"--{name.replace('_', '-')} is {value}: give a finite number.")
        _require_positive(self, "lr", "lr_decay_iters", "adam_eps")
        for name in ("min_lr", "lr_warmup_init", "lr_warmup_iters", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            _require(value >= 0, f"--{name.replace('_', '-')} is {value}: give 0 or a positive number.")
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"--{name.replace('_', '-')} is {value}: give a number from 0 up to below 1.")
        fraction = self.lr_warmup_fraction
        _require(
            fraction is None or 0 <= fraction < 1,
            f"--lr-warmup-fraction is {fraction}: give a share from 0 up to below 1.",
        )
        _require(
            fraction is None or self.lr_warmup_iters == 0,
            f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {self.lr_warmup_iters} both say how long warm-up "
            "is: give one of them.",
        )
        _require(
            self.lr is None or self.min_lr <= self.lr,
            f"--min-lr {self.min_lr} is above --lr {self.lr}: lower it to at most the largest rate.",
        )


@dataclass
class CheckpointConfig:
    """Saving and resuming (torch.distributed.checkpoint)."""

    save: str | None = None
    """Directory that checkpoints are written to; without it nothing is saved."""
    save_interval: int | None = None
    """Steps between checkpoints; without it only the end of the run is saved."""
    save_retain_interval: int | None = None
    """Keep the checkpoints whose step is a multiple of this and the newest, and delete the older others in --save once
    a newer one is complete; without it all are kept."""
    load: str | None = None
    """Directory whose latest checkpoint the run continues from; an empty one starts from scratch and says so."""
    load_hf: str | None = None
    """Folder of a Hugging Face checkpoint: sets the model's defaults, and gives the weights unless --load holds a
    checkpoint (not in Megatron)."""
    skip_mtp: bool = False
    """Leave out the multi-token-prediction layers of --load-hf (not in Megatron)."""
    ckpt_step: int | None = None
    """Continue from this step's checkpoint instead of the latest."""
    exit_on_missing_checkpoint: bool = False
    """Stop where --load holds no checkpoint, instead of starting from scratch."""
    finetune: bool = False
    """Load weights alone: step, optimizer, random numbers and data position start afresh."""
    load_optim: bool = True
    """Load the optimizer's state."""
    load_rng: bool = True
    """Load the state of the random number generators."""
    save_optim: bool = True
    """Save the optimizer's state."""
    save_rng: bool = True
    """Save the state of the random number generators."""

    def __post_init__(self) -> None:
        _require_positive(self, "save_interval", "save_retain_interval")
        _require(
            self.ckpt_step is None or self.ckpt_step >= 0,
            f"--ckpt-step is {self.ckpt_step}: give the step of a checkpoint, 0 or a positive number.",
        )
        _require(
            self.save is not None or self.save_interval is None,
            f"--save-interval {self.save_interval} has nowhere to save to: give --save DIR, or drop it.",
        )
        retain, every = self.save_retain_interval, self.save_interval
        _require(
            retain is None or self.save is not None,
            f"--save-retain-interval {retain} has no checkpoints to keep: give --save DIR, or drop it.",
        )
        _require(
            retain is None or every is None or retain % every == 0,
            f"--save-retain-interval {retain} is no multiple of --save-interval {every}, so some of the steps that it "
            "keeps are never saved: change one of them.",
        )
        for flag, given in (("--ckpt-step", self.ckpt_step is not None), ("--finetune", self.finetune)):
            _require(not given or self.load is not None, f"{flag} has nothing to load: give --load DIR, or drop it.")
        _require(
            not self.skip_mtp or self.load_hf is not None,
            "--skip-mtp has no checkpoint to skip in: give --load-hf FOLDER, or drop it.",
        )


@dataclass
class LoggingConfig:
    """Where the run reports to, and how often."""

    log_interval: int = 100
    """Steps between lines on the console when it is no terminal (a terminal gets a progress bar)."""
    log_dir: str | None = None
    """Directory of metrics.jsonl, loss_curve.png and summary.json; --save when unset (not in Megatron)."""
    tensorboard_dir: str | None = None
    """Directory of TensorBoard events."""
    tensorboard_log_interval: int = 1
    """Steps between TensorBoard and Weights & Biases records."""
    wandb_project: str | None = None
    """Report to this Weights & Biases project; needs the wandb package."""
    wandb_entity: str | None = None
    """Weights & Biases entity that the project belongs to."""
    wandb_exp_name: str | None = None
    """Weights & Biases name of this run."""
    wandb_save_dir: str | None = None
    """Directory of Weights & Biases' local files."""
    dsa_log_mass_interval: int = 100
    """Steps between measurements of the attention mass, the share of dense attention probability that the selected
    keys hold; 0 measures nothing (not in Megatron)."""
    dsa_log_mass_rows: int = 64
    """Rows of a layer that the attention mass is measured on (not in Megatron)."""

    def __post_init__(self) -> None:
        _require_positive(self, "log_interval", "tensorboard_log_interval", "dsa_log_mass_rows")
        _require(
            self.dsa_log_mass_interval >= 0,
            f"--dsa-log-mass-interval is {self.dsa_log_mass_interval}: give a number of steps, or 0 for never.",
        )


@dataclass
class DistributedConfig:
    """Processes and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU where there is one (not in Megatron)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library under torchrun: by default nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: int = 10
    """Minutes after which a communication that does not end is an error."""

    def __post_init__(self) -> None:
        _require_positive(self, "distributed_timeout_minutes")
