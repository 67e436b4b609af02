"""The run: from a complete configuration to a trained, evaluated and reported model.

``prepare.py`` has found everything that can be wrong with the input, and created nothing. ``Trainer.run`` steps,
evaluates, saves and reports. The order after each step is: evaluate, log, save, stop. So the metrics of a saved step
are on disk before its checkpoint counts, except where they cannot be written: that step is saved all the same, and
stops the run.

Of several processes each runs the same steps on its own rows. The first one writes figures and reports; what decides
about the run (figures, a signal, the clock, a disk) is settled among all before anyone acts on it. So several processes
wait for their devices twice a step: for the figures, and for all other reasons to stop once the next step's samples are
read. So what one rank cannot read or write costs no finished step. An evaluation looks before each global batch, and
one that is left gives no figure.

Every evaluation sees the same first samples of its set, whatever was consumed before, so its figures are comparable
and a resume does not move them. Evaluation draws no random numbers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.tensor_parallel.mappings import group_rank, group_size
from megatron.training.attention_mass import MassProbe
from megatron.training.checkpointing import Checkpoint, save_checkpoint
from megatron.training.config import LoggingConfig
from megatron.training.console import Console, SilentConsole
from megatron.training.data.batch import Batch
from megatron.training.data.build import SampleDataset
from megatron.training.data.sampler import batches
from megatron.training.flops import peak_flops, training_flops
from megatron.training.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron.training.prepare import Prepared, config_record
from megatron.training.ranks import first_said, largest, on_first_rank, rank, wait_for_the_first, world_size
from megatron.training.report import CURVE_FILE, EVALUATION_FILE, SUMMARY_FILE, describe, plot_curves, write_summary
from megatron.training.retention import delete_older
from megatron.training.scheduler import learning_rate
from megatron.training.signals import StopRequest, stop_requests
from megatron.training.step import (
    NonFiniteError,
    RunStopped,
    StepResult,
    evaluate,
    train_step,
    workload,
)

_FAILURE = "what a rank cannot read or write"


class _EvaluationLeft(Exception):
    """All ranks left an evaluation, because of the reason that is the argument."""


class _Fetched(NamedTuple):
    """This rank's micro-batches of one step, and the seconds that reading them took."""

    micro_batches: list[Batch]
    seconds: float


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
        self.dp_rank, self.dp_size = group_rank(prepared.engine.groups.dp), group_size(prepared.engine.groups.dp)
        self.log_dir = next((Path(p) for p in (config.logging.log_dir, config.checkpoint.save) if p), None)
        self.topk = config.model.dsa_indexer_topk if config.model.experimental_attention_variant else None
        self.peak = peak_flops(self.engine.device)
        self.saved_step = -1
        self.request = StopRequest()
        self.failure: str | None = None  # a sentence without its end, of this rank alone
        self.record = config_record(config)
        self.speaks = rank() == 0
        # An evaluation alone logs no steps, and leaves those of the run that it evaluates as they are.
        logs = self.speaks and not config.training.skip_train
        logging, log_dir = (config.logging, self.log_dir) if logs else (LoggingConfig(), None)
        self.metrics = MetricsWriter(logging, log_dir, self.progress.step + 1, self.record)
        console = Console(self.progress.step, train_iters, config.logging.log_interval) if self.speaks else None
        self.console = console or SilentConsole()
        for notice in (*config.notices, *prepared.notices, *self.metrics.notices):
            self.console.say(notice)

    def run(self) -> int:
        """Train, evaluate and report; returns the exit code."""
        try:
            with stop_requests() as self.request:
                finished = self.config.training.skip_train or self._train()
                if finished:
                    self._finish()
            return 0
        except RunStopped as error:
            if not self.speaks:
                wait_for_the_first()
            what = "the evaluation" if self.config.training.skip_train else "training"
            self.console.say(f"{error}: {what} stops{self._advice()}.")
            return 1
        except KeyboardInterrupt:
            self.console.say(f"Interrupted again, so the run stops at once{self._advice()}.")
            return 130
        finally:
            self.console.close()
            self.metrics.close()

    def _advice(self) -> str:
        if self.config.training.skip_train:
            return ""
        if self.last_good is None:
            return "; there is no checkpoint to continue from"
        good = self.last_good
        return f"; the last good checkpoint is {good.path} (step {good.progress.step}), continue it with --load"

    # ---- steps ----

    def _train(self) -> bool:
        """Step until the run is done (True) or has to stop early (False)."""
        stream = self._batches(self.datasets[0], self.progress.consumed_samples)
        started, before = time.monotonic(), self.progress.step
        while self.progress.step < self.train_iters:
            trained = self.progress.step > before
            planned = self._planned(started) if trained else {}
            fetched = self._read(stream, f"step {self.progress.step + 1}", stops=any(planned.values()))
            reason = self._agreed(planned | self._urgent())
            if reason is not None:
                self._stop(reason, trained)
                return False
            record = self._step(fetched)
            if self._due(self.config.validation.eval_interval):
                with suppress(_EvaluationLeft):
                    record |= self._evaluate("valid")
            self._log(record)
            if self._due(self.config.checkpoint.save_interval):
                self._save()
        return True

    def _stop(self, reason: str, trained: bool) -> None:
        if trained:
            self._save()
        self._require_no_failure()
        saved = f"saved {self.last_good.path}" if self.last_good and self._is_saved() else "not saved"
        self.console.say(f"Stopped after step {self.progress.step} because of {reason} ({saved}).")

    def _require_no_failure(self) -> None:
        if self._agreed({_FAILURE: self.failure is not None}):
            raise RunStopped(first_said(self.failure))

    def _log(self, record: dict[str, Any]) -> None:
        try:
            self.metrics.write(record)
        except OSError as error:
            self._fail(f"The figures of step {self.progress.step} cannot be written", error)
        self.console.step(record)

    def _fail(self, what: str, error: Exception) -> None:
        """Remember the first thing that this rank cannot do, and let the run stop where all of them look."""
        lines = str(error).strip().splitlines() or [type(error).__name__]  # a reader's process sends its trace along
        self.failure = self.failure or f"{what} ({lines[-1].strip().rstrip('.')})"

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.progress.step % interval == 0

    def _urgent(self) -> dict[str, bool]:
        """Reasons to stop that do not wait for the end of an evaluation, and whether they hold on this rank."""
        received = self.request.received
        return {"SIGINT": received == "SIGINT", "SIGTERM": received == "SIGTERM", _FAILURE: self.failure is not None}

    def _planned(self, started: float) -> dict[str, bool]:
        training = self.config.training
        minutes = training.exit_duration_in_mins
        return {
            f"--exit-duration-in-mins {minutes or 0:g}": minutes is not None
            and time.monotonic() - started > 60 * minutes,
            f"--exit-interval {training.exit_interval}": self._due(training.exit_interval),
        }

    def _agreed(self, reasons: Mapping[str, bool]) -> str | None:
        """The last reason that holds, of any rank: all stop after the same step."""
        number = max((place for place, holds in enumerate(reasons.values(), 1) if holds), default=0)
        number = largest(number, self.engine.groups, self.engine.device)
        return list(reasons)[number - 1] if number else None

    def _step(self, fetched: _Fetched) -> dict[str, Any]:
        start = time.perf_counter() - fetched.seconds
        interval = self.config.logging.dsa_log_mass_interval
        step = self.progress.step + 1
        measured = self.topk is not None and interval > 0 and (step % interval == 0 or step in (1, self.train_iters))
        probe = MassProbe(self.config.logging.dsa_log_mass_rows) if measured else None
        rate = learning_rate(self.config.optimizer, self.progress.step, self.train_iters)
        try:
            result = train_step(self.engine, fetched.micro_batches, rate, probe)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} at step {step}") from None
        self.progress.step = step
        self.progress.consumed_samples += self.batch_size
        # Documents are cut alike on all data-parallel ranks in the mean; this rank's work stands for each of them.
        work = workload(fetched.micro_batches, self.topk)
        flops = training_flops(self.config.model, work) * self.dp_size / world_size()
        return self._figures(result, rate, time.perf_counter() - start, work.tokens * self.dp_size, flops)

    def _read(self, stream: Iterator[Batch], what: str, stops: bool = False) -> _Fetched:
        """This rank's share of the next global batch; nothing where the data end, or the run does."""
        start, micro_batches = time.perf_counter(), []
        stops = stops or any(self._urgent().values())
        count = 0 if stops else self.batch_size // (self.micro_batch_size * self.dp_size)
        try:
            micro_batches = list(islice(stream, count))
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(f"The data of {what} cannot be read", error)
        return _Fetched(micro_batches, time.perf_counter() - start)

    def _figures(self, result: StepResult, rate: float, seconds: float, tokens: int, flops: float) -> dict[str, Any]:
        losses, masses = result.indexer_losses, result.attention_mass
        balance = {"load_balancing_loss": _mean(result.balance_losses)} if result.balance_losses else {}
        return {
            "step": self.progress.step,
            "lm_loss": result.lm_loss,
            "indexer_loss": _mean(losses),
            "indexer_loss_by_layer": {str(layer): loss for layer, loss in sorted(losses.items())},
            **balance,
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
        workers = self.config.data.num_workers
        return batches(dataset, consumed, self.micro_batch_size, self.dp_rank, self.dp_size, workers)

    # ---- evaluation, saving, reporting ----

    def _evaluate(self, split: str) -> dict[str, Any]:
        dataset = self.datasets[1 if split == "valid" else 2]
        if dataset is None:
            return {}
        probe = MassProbe(self.config.logging.dsa_log_mass_rows) if self.topk is not None else None
        loss, masses = evaluate(self.engine, self._until_stopped(self._batches(dataset, 0)), probe)
        return {f"{split}_lm_loss": loss, f"{split}_dsa_attention_mass": _mean(masses)}

    def _until_stopped(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            micro_batches = self._read(stream, "the evaluation").micro_batches
            if reason := self._agreed(self._urgent()):
                raise _EvaluationLeft(reason)
            if not micro_batches:
                return
            yield from micro_batches

    def _is_saved(self) -> bool:
        return self.saved_step == self.progress.step

    def _save(self) -> None:
        options = self.config.checkpoint
        if self._is_saved():
            return
        try:
            self.metrics.sync()
        except OSError as error:
            self._fail(f"The figures up to step {self.progress.step} cannot be written", error)
        if options.save is None:
            return
        progress, engine = dataclasses.replace(self.progress), self.engine
        try:
            what = progress, engine.model, engine.optimizer, options, self.record, engine.groups
            path = save_checkpoint(Path(options.save), *what)
        except OSError as error:
            raise RunStopped(f"The checkpoint of step {progress.step} cannot be saved ({error})") from error
        self.saved_step, self.last_good = progress.step, Checkpoint(path, progress)
        if options.save_retain_interval is not None and self.speaks:
            for warning in delete_older(Path(options.save), options.save_retain_interval):
                self.console.say(warning)

    def _finish(self) -> None:
        if not self.config.training.skip_train:
            self._save()
            self._require_no_failure()
        split = "test" if self.datasets[2] is not None else "valid"
        try:
            held_out = {key.removeprefix(f"{split}_"): value for key, value in self._evaluate(split).items()}
        except _EvaluationLeft as error:
            self._stop(str(error), trained=False)
            return
        held_out["split"] = "test" if split == "test" else "validation"
        self.console.close()
        report = self._report_evaluation if self.config.training.skip_train else self._report
        try:
            on_first_rank(lambda: report(held_out))
        except OSError as error:
            raise RunStopped(f"The report of the run cannot be written ({error})") from error

    def _report_evaluation(self, held_out: dict[str, Any]) -> None:
        """Of a run that trained nothing; what the training run left in the same directory stays."""
        assert self.config.model.vocab_size is not None
        for sentence in describe([], held_out, self.config.model.vocab_size):
            self.console.say(sentence)
        if self.log_dir is not None:
            write_summary(self.log_dir / EVALUATION_FILE, {"step": self.progress.step, "held_out": held_out})
            self.console.say(f"Evaluation: {self.log_dir / EVALUATION_FILE}")

    def _report(self, held_out: dict[str, Any]) -> None:
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
