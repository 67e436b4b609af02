"""Where figures go: metrics.jsonl, TensorBoard, Weights & Biases.

``metrics.jsonl`` holds one line a step, flushed at once, so that a killed run loses nothing but the step it was in.
Figures that cannot be written are an ``OSError``: the run saves their step and stops; its line may be missing then. A
number that is not finite is null there, since JSON has no other word for it.

A resumed run first takes the lines of steps that it will do again out, and a half-written last line: so each step
stands there once, and the file reads like that of an uninterrupted run. What was taken out is kept in
``metrics.1.jsonl`` and so on; of a run from the start in an earlier run's directory that is all of the earlier one.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from megatron.training.config import LoggingConfig

Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"


def wandb_is_installed() -> bool:
    """Whether the wandb package can be imported."""
    return find_spec("wandb") is not None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without other lines: a kill or a power loss leaves half of one, or NULs."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def as_json(content: Record, indent: int | None = None) -> str:
    """JSON text of ``content``; numbers that are not finite become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), indent=indent, allow_nan=False)


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record under flat names: entries of a mapping become ``name/key``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", float(item)) for key, item in value.items() if item is not None)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield name, float(value)


class MetricsWriter:
    """Writes the records of one process to every place that was asked for.

    Attributes:
        notices: what is to be said about what an earlier run left there.
    """

    def __init__(self, config: LoggingConfig, log_dir: Path | None, first_step: int, run_config: Record) -> None:
        self._interval = config.tensorboard_log_interval
        self.notices: list[str] = []
        self._file: TextIO | None = None
        if log_dir is not None:
            self.notices += _take_out_steps(log_dir / METRICS_FILE, first_step)
            self._file = (log_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._tensorboard = _open_tensorboard(config, first_step)
        self._thread_errors = threading.excepthook
        if self._tensorboard is not None:
            threading.excepthook = self._take_thread_error
        self._wandb = _open_wandb(config, run_config)

    def write(self, record: Record) -> None:
        """Take one step's record; ``record["step"]`` is its number."""
        if self._file is not None:
            with _naming(self._file.name):
                self._file.write(as_json(record) + "\n")
                self._file.flush()
        if record["step"] % self._interval:
            return
        figures = dict(scalars(record))
        if self._tensorboard is not None:
            with _naming(self._tensorboard.log_dir):
                for name, value in figures.items():
                    self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(figures, step=record["step"])

    def sync(self) -> None:
        """Bring what was written to the disk; called before a checkpoint is saved."""
        if self._file is not None:
            with _naming(self._file.name):
                os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            with _naming(self._tensorboard.log_dir):
                self._tensorboard.flush()

    def close(self) -> None:
        """Finish all files; what a full disk did not take has been said when it was written."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.close()
            threading.excepthook = self._thread_errors
        if self._wandb is not None:
            self._wandb.finish()

    def _take_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard raises what stopped its thread again at the next figure, so it is said there."""
        if not type(error.thread).__module__.startswith("tensorboard."):
            self._thread_errors(error)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Let an error say where it happened, which that of a write does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{error.strerror or error}: {place}") from error


def _take_out_steps(path: Path, first_step: int) -> list[str]:
    """Move the lines of ``first_step`` and later ones aside; returns what is to be said about it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = read_metrics(path)
    again = [record for record in records if record["step"] >= first_step]
    notices = []
    if again:
        aside = _unused(path)
        _write_records(aside, again)
        steps = sorted(record["step"] for record in again)
        notices = [f"{path} held steps {steps[0]} to {steps[-1]} of an earlier run: they are in {aside.name} now."]
    _write_records(path, [record for record in records if record["step"] < first_step])
    return notices


def _write_records(path: Path, records: list[dict[str, Any]]) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("".join(as_json(record) + "\n" for record in records), encoding="utf-8")
    os.replace(unfinished, path)


def _unused(path: Path) -> Path:
    """``metrics.1.jsonl`` and so on: a place for lines of an earlier run."""
    return next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())


def _open_tensorboard(config: LoggingConfig, first_step: int) -> Any:
    if config.tensorboard_dir is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(config.tensorboard_dir, purge_step=first_step if first_step > 1 else None)


def _open_wandb(config: LoggingConfig, run_config: Record) -> Any:
    if config.wandb_project is None:
        return None
    import wandb

    if config.wandb_save_dir is not None:  # where it is missing, wandb takes the system's temporary directory
        Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=config.wandb_exp_name,
        dir=config.wandb_save_dir,
        config=dict(run_config),
    )
