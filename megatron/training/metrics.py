"""Where figures go: metrics.jsonl, TensorBoard, Weights & Biases.

``metrics.jsonl`` holds one line a step, flushed at once, so that a killed run loses nothing but the step it was in.
A resumed run first drops the lines of steps that it will do again, and a half-written last line: so each step
stands there once, and the file reads like that of an uninterrupted run. A run from the start in an earlier run's
directory moves that one's file aside, to ``metrics.1.jsonl`` and so on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
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
    """The records of a metrics file, without a half-written last line."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record under flat names: entries of a mapping or list become ``name/key``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", float(item)) for key, item in value.items() if item is not None)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield name, float(value)


class MetricsWriter:
    """Writes the records of one process to every place that was asked for."""

    def __init__(self, config: LoggingConfig, log_dir: Path | None, first_step: int, run_config: Record) -> None:
        self._interval = config.tensorboard_log_interval
        self._file = None if log_dir is None else _open_metrics(log_dir / METRICS_FILE, first_step)
        self._tensorboard = _open_tensorboard(config, first_step)
        self._wandb = _open_wandb(config, run_config)

    def write(self, record: Record) -> None:
        """Take one step's record; ``record["step"]`` is its number."""
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        if record["step"] % self._interval:
            return
        figures = dict(scalars(record))
        if self._tensorboard is not None:
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(figures, step=record["step"])

    def sync(self) -> None:
        """Bring what was written to the disk; called before a checkpoint counts."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Finish all files."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _open_metrics(path: Path, first_step: int) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = read_metrics(path)
    kept = [record for record in records if record["step"] < first_step]
    if records and not kept:  # a run from the start, over another one's directory
        os.replace(path, _unused(path))
    replacement = path.with_suffix(".tmp")
    replacement.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(replacement, path)
    return path.open("a", encoding="utf-8")


def _unused(path: Path) -> Path:
    """``metrics.1.jsonl`` and so on: a place for what an earlier run wrote."""
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

    return wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=config.wandb_exp_name,
        dir=config.wandb_save_dir,
        config=dict(run_config),
    )
