"""The run: from a complete configuration to a trained, evaluated and reported model.

``prepare`` reads everything that can be wrong (data files, model options, the checkpoint) and creates nothing on
disk; ``Trainer.run`` then steps, evaluates, saves and reports. The order after each step is: evaluate, log, save,
stop. So the metrics of every saved step are on disk before its checkpoint counts.

Every evaluation sees the same first samples of its set, whatever was consumed before, so its figures are comparable
and a resume does not move them. Evaluation draws no random numbers.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.hf import load_hf_weights, portability_notes
from megatron.training.arguments import PretrainConfig
from megatron.training.checkpointing import (
    Checkpoint,
    Progress,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from megatron.training.compute_params import ComputeParams, as_fp32, fp32_islands
from megatron.training.console import Console
from megatron.training.data.batch import Batch
from megatron.training.data.build import Datasets, SampleDataset, build_datasets
from megatron.training.data.sampler import batches
from megatron.training.dsa_health import MassProbe
from megatron.training.flops import peak_flops, training_flops
from megatron.training.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron.training.optimizer import build_optimizer
from megatron.training.report import CURVE_FILE, SUMMARY_FILE, describe, plot_curves, write_summary
from megatron.training.scheduler import learning_rate
from megatron.training.signals import StopRequest, stop_requests
from megatron.training.step import Engine, NonFiniteError, RunStopped, StepResult, evaluate, train_step, workload
from megatron.training.tokenizer import Tokenizer
from megatron.training.validate import require_memory


@dataclass
class Prepared:
    """A run that can start: nothing is on disk yet, and nothing more can be wrong with its input."""

    config: PretrainConfig
    engine: Engine
    datasets: Datasets
    progress: Progress
    checkpoint: Checkpoint | None
    notices: list[str]


def prepare(config: PretrainConfig, tokenizer: Tokenizer, device: torch.device) -> Prepared:
    """Open the data, build the model and load the checkpoint.

    Raises:
        ValueError: one sentence about what is wrong.
    """
    datasets = build_datasets(config.data, _dataset_sizes(config), tokenizer)
    if datasets[0] is None and not config.training.skip_train:
        raise ValueError("The training set is empty: give it a share of --split, or name --train-data-path.")
    require_memory(config.model, device)
    torch.manual_seed(config.data.seed)
    if config.model.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch refuses to multiply on a GPU without it
        torch.use_deterministic_algorithms(True)
    model = as_fp32(build_gpt_model(config.model, device=device))
    engine = Engine(
        model,
        ComputeParams(model, config.model.params_dtype, fp32_islands(config.model)),
        build_optimizer(model, config.optimizer),
        device,
        config.optimizer,
        config.model.calculate_per_token_loss,
        config.training.check_for_nan_in_loss_and_grad,
    )
    checkpoint, progress, notices = _load(config, engine)
    return Prepared(config, engine, datasets, progress, checkpoint, notices)


def config_record(config: PretrainConfig) -> dict[str, Any]:
    """All options as JSON can hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    record = plain(dataclasses.asdict(config))
    assert isinstance(record, dict)
    return record


def _dataset_sizes(config: PretrainConfig) -> tuple[int, int, int]:
    training = config.training
    assert training.train_iters is not None and training.global_batch_size is not None
    evaluation = config.validation.eval_iters * training.global_batch_size
    return training.train_iters * training.global_batch_size, evaluation, evaluation


def _load(config: PretrainConfig, engine: Engine) -> tuple[Checkpoint | None, Progress, list[str]]:
    options = config.checkpoint
    checkpoint = None if options.load is None else find_checkpoint(options)
    if checkpoint is None:
        return None, Progress(), _initial_weights(config, engine)
    fresh = load_checkpoint(checkpoint, engine.model, engine.optimizer, options)
    if options.finetune:
        return checkpoint, Progress(), [f"Weights come from {checkpoint.path}; everything else starts afresh."]
    progress = dataclasses.replace(checkpoint.progress)
    notices = [f"Resumed from {checkpoint.path} after step {progress.step}."]
    if fresh:
        notices.append(f"Optimizer state starts fresh for {len(fresh)} parameters that had none ({fresh[0]}, ...).")
    return checkpoint, progress, notices


def _initial_weights(config: PretrainConfig, engine: Engine) -> list[str]:
    """Fill a model that no checkpoint fills, and say with what."""
    options = config.checkpoint
    empty = [] if options.load is None else [f"{options.load} holds no checkpoint yet: training starts from scratch."]
    if options.load_hf is None:
        return empty
    load_hf_weights(engine.model, options.load_hf, skip_mtp=options.skip_mtp, progress=True)
    return [f"Weights come from {options.load_hf}.", *portability_notes(config.model)]


class Trainer:
    """Runs what was prepared."""

    def __init__(self, prepared: Prepared) -> None:
        self.config = config = prepared.config
        self.engine, self.datasets, self.progress = prepared.engine, prepared.datasets, prepared.progress
        self.last_good = prepared.checkpoint
        train_iters, batch_size = config.training.train_iters, config.training.global_batch_size
        micro_batch_size = config.training.micro_batch_size
        assert train_iters is not None and batch_size is not None and micro_batch_size is not None
        self.train_iters, self.batch_size, self.micro_batch_size = train_iters, batch_size, micro_batch_size
        self.log_dir = next((Path(p) for p in (config.logging.log_dir, config.checkpoint.save) if p), None)
        self.topk = config.model.dsa_indexer_topk if config.model.experimental_attention_variant else None
        self.peak = peak_flops(self.engine.device)
        self.saved_step = -1
        self.record = config_record(config)
        self.metrics = MetricsWriter(config.logging, self.log_dir, self.progress.step + 1, self.record)
        self.console = Console(self.progress.step, train_iters, config.logging.log_interval)
        for notice in (*config.notices, *prepared.notices):
            self.console.say(notice)

    def run(self) -> int:
        """Train, evaluate and report; returns the exit code."""
        try:
            with stop_requests() as request:
                finished = self.config.training.skip_train or self._train(request)
            if finished:
                self._finish()
            return 0
        except RunStopped as error:
            self.console.say(f"{error}: training stops; {self._advice()}.")
            return 1
        finally:
            self.console.close()
            self.metrics.close()

    def _advice(self) -> str:
        if self.last_good is None:
            return "there is no checkpoint to continue from"
        good = self.last_good
        return f"the last good checkpoint is {good.path} (step {good.progress.step}), continue it with --load"

    # ---- steps ----

    def _train(self, request: StopRequest) -> bool:
        """Step until the run is done (True) or has to stop early (False)."""
        stream = self._batches(self.datasets[0], self.progress.consumed_samples)
        started = time.monotonic()
        while self.progress.step < self.train_iters:
            record = self._step(stream)
            if self._due(self.config.validation.eval_interval):
                record |= self._evaluate("valid")
            self.metrics.write(record)
            self.console.step(record)
            if self._due(self.config.checkpoint.save_interval):
                self._save()
            reason = self._stop_reason(request, started)
            if reason is not None and self.progress.step < self.train_iters:
                self._save()
                saved = (
                    f"saved {self.last_good.path}" if self.last_good and self.config.checkpoint.save else "not saved"
                )
                self.console.say(f"Stopped after step {self.progress.step} because of {reason} ({saved}).")
                return False
        return True

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.progress.step % interval == 0

    def _stop_reason(self, request: StopRequest, started: float) -> str | None:
        training = self.config.training
        if request.received is not None:
            return request.received
        if self._due(training.exit_interval):
            return f"--exit-interval {training.exit_interval}"
        minutes = training.exit_duration_in_mins
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            return f"--exit-duration-in-mins {minutes:g}"
        return None

    def _step(self, stream: Iterator[Batch]) -> dict[str, Any]:
        start = time.perf_counter()
        micro_batches = self._read(stream)
        interval = self.config.logging.dsa_log_mass_interval
        step = self.progress.step + 1
        measured = self.topk is not None and interval > 0 and (step % interval == 0 or step in (1, self.train_iters))
        probe = MassProbe(self.config.logging.dsa_log_mass_rows) if measured else None
        rate = learning_rate(self.config.optimizer, self.progress.step, self.train_iters)
        try:
            result = train_step(self.engine, micro_batches, rate, probe)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} at step {step}") from None
        self.progress.step = step
        self.progress.consumed_samples += self.batch_size
        work = workload(micro_batches, self.topk)
        return self._figures(result, rate, time.perf_counter() - start, work.tokens, self._flops(work))

    def _read(self, stream: Iterator[Batch]) -> list[Batch]:
        try:
            return list(islice(stream, self.batch_size // self.micro_batch_size))
        except (OSError, ValueError) as error:
            raise RunStopped(f"The data of step {self.progress.step + 1} cannot be read ({error})") from error

    def _flops(self, work: Any) -> float:
        return training_flops(self.config.model, work)

    def _figures(self, result: StepResult, rate: float, seconds: float, tokens: int, flops: float) -> dict[str, Any]:
        losses, masses = result.indexer_losses, result.attention_mass
        return {
            "step": self.progress.step,
            "lm_loss": result.lm_loss,
            "indexer_loss": _mean(losses),
            "indexer_loss_by_layer": {str(layer): loss for layer, loss in sorted(losses.items())},
            "grad_norm": result.grad_norm,
            "lr": rate,
            "tokens_per_second": tokens / seconds,
            "tflops_per_gpu": flops / seconds / 1e12,
            "mfu": None if self.peak is None else flops / seconds / self.peak,
            "dsa_attention_mass": _mean(masses),
            "consumed_samples": self.progress.consumed_samples,
            "seconds": seconds,
        }

    def _batches(self, dataset: SampleDataset | None, consumed: int) -> Iterator[Batch]:
        assert dataset is not None
        return batches(dataset, consumed, self.micro_batch_size, num_workers=self.config.data.num_workers)

    # ---- evaluation, saving, reporting ----

    def _evaluate(self, split: str) -> dict[str, Any]:
        dataset = self.datasets[1 if split == "valid" else 2]
        if dataset is None:
            return {}
        probe = MassProbe(self.config.logging.dsa_log_mass_rows) if self.topk is not None else None
        loss, masses = evaluate(self.engine, self._batches(dataset, 0), probe)
        return {f"{split}_lm_loss": loss, f"{split}_dsa_attention_mass": _mean(masses)}

    def _save(self) -> None:
        options = self.config.checkpoint
        if options.save is None or self.saved_step == self.progress.step:
            return
        self.metrics.sync()
        progress, engine = dataclasses.replace(self.progress), self.engine
        try:
            path = save_checkpoint(Path(options.save), progress, engine.model, engine.optimizer, options, self.record)
        except OSError as error:
            raise RunStopped(f"The checkpoint of step {progress.step} cannot be saved ({error})") from error
        self.saved_step, self.last_good = progress.step, Checkpoint(path, progress)

    def _finish(self) -> None:
        if not self.config.training.skip_train:
            self._save()
        split = "test" if self.datasets[2] is not None else "valid"
        held_out = {key.removeprefix(f"{split}_"): value for key, value in self._evaluate(split).items()}
        held_out["split"] = "test" if split == "test" else "validation"
        self.console.close()
        records: list[dict[str, Any]] = []
        if self.log_dir is not None:
            records = read_metrics(self.log_dir / METRICS_FILE)
        vocab_size = self.config.model.vocab_size
        assert vocab_size is not None
        for sentence in describe(records, held_out, vocab_size):
            self.console.say(sentence)
        if self.log_dir is not None:
            plot_curves(records, self.log_dir / CURVE_FILE)
            summary = {"step": self.progress.step, "last": records[-1] if records else None, "held_out": held_out}
            write_summary(self.log_dir / SUMMARY_FILE, summary)
        for what, place in self._places():
            self.console.say(f"{what}: {place}")

    def _places(self) -> list[tuple[str, str]]:
        places = []
        if self.log_dir is not None:
            names = (("Metrics", METRICS_FILE), ("Loss curves", CURVE_FILE), ("Summary", SUMMARY_FILE))
            places += [(what, str(self.log_dir / name)) for what, name in names]
        if self.config.logging.tensorboard_dir is not None:
            places.append(("TensorBoard", f"tensorboard --logdir {self.config.logging.tensorboard_dir}"))
        if self.last_good is not None and self.config.checkpoint.save is not None:
            places.append(("Checkpoint", str(self.last_good.path)))
        return places


def _mean(by_layer: Mapping[int, float]) -> float | None:
    return sum(by_layer.values()) / len(by_layer) if by_layer else None
