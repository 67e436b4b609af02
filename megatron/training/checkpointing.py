"""Checkpoints by torch.distributed.checkpoint: atomic, inspectable, resumed by name.

    DIR/latest_checkpointed_iteration.txt     the step to resume from, as in Megatron-LM
    DIR/iter_0000100/                         one checkpoint
        .metadata, *.distcp                   parameters, buffers, optimizer moments by parameter name, RNG state
        config.json, run.json                 all flags; step and consumed samples
        checksums.json                        of the bytes of the other files

A save writes into a hidden directory, brings it to the disk, renames it, and only then replaces the file that names
the latest step. Whenever the process dies, that file names a whole checkpoint. Leftovers of killed saves, and of
killed deletions of older checkpoints, are removed by the next one. A step that is saved again first moves its old
checkpoint aside under a name that loading also looks for.

The learning-rate schedule, the data and Python's own random numbers have no saved state: the first two are
functions of the step and of the consumed samples, and nothing draws from the third. Optimizer moments of parameters
that did not train then are missing and start fresh; moments of parameters that do not train now are ignored.

Several processes write one checkpoint, each its own shards, into a directory that all of them see; the first one does
what is to be done once. What a checkpoint holds does not depend on how many they were: names and shapes are those of
one process, and any other number reads its own parts. State that ranks hold alike is compared before it is written.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, TensorStorageMetadata

from megatron.core.process_groups import ProcessGroupCollection
from megatron.training.checkpoint_files import (
    CHECKSUMS,
    ChangedError,
    Reader,
    Writer,
    all_checksums,
    own_checksums,
    reason,
    require_saved_bytes,
)
from megatron.training.config import CheckpointConfig
from megatron.training.optimizer import load_optimizer_state, optimizer_state, trained_parameters
from megatron.training.ranks import flat_tensors, gathered, on_first_rank, require_equal_replicas

LATEST = "latest_checkpointed_iteration.txt"
DELETED = ".deleted_"
_UNFINISHED = ".unfinished_"
_REPLACED = ".replaced"
_SHOWN_MISMATCHES = 3


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    progress: Progress


def step_directory(root: Path, step: int) -> Path:
    """Where step ``step`` is saved."""
    return root / f"iter_{step:07d}"


# ---- saving ----


def save_checkpoint(
    root: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: CheckpointConfig,
    run_config: dict[str, Any],
    groups: ProcessGroupCollection | None = None,
) -> Path:
    """Save atomically (see the module docstring) and return the checkpoint's directory; every rank calls it.

    Raises:
        OSError: the disk is full, or will not take it; raised on all ranks.
        ValueError: ranks hold different values of what should be the same.
    """
    on_first_rank(lambda: _clear(root))
    final = step_directory(root, progress.step)
    unfinished = root / f"{_UNFINISHED}{final.name}"
    state: dict[str, Any] = {"model": model.state_dict()}
    if config.save_optim:
        state["optimizer"] = optimizer_state(model, optimizer)
    if config.save_rng:
        state["rng"] = _rng_state()
    if groups is not None:
        require_equal_replicas(dict(flat_tensors(state)), groups)
    _write(unfinished, state)
    checksums = gathered(own_checksums(unfinished))

    def complete() -> None:
        try:
            _write_json(unfinished / "config.json", run_config)
            _write_json(unfinished / "run.json", asdict(progress) | {"torch": torch.__version__})
            _write_json(unfinished / CHECKSUMS, all_checksums(unfinished, checksums))
            _sync_directory(unfinished)
            _publish(unfinished, final)
            _replace_text(root / LATEST, str(progress.step))
        except OSError as error:
            raise _given_up(unfinished, error) from error

    on_first_rank(complete)
    return final


def _clear(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    for leftover in root.glob(f"{DELETED}iter_*"):
        shutil.rmtree(leftover, ignore_errors=True)  # in nobody's way


def _write(path: Path, state: STATE_DICT_TYPE) -> None:
    try:
        with _single_process_is_meant():
            dcp.save(state, storage_writer=Writer(path, sync_files=True), no_dist=not _distributed())
    except CheckpointException as error:
        failure = _given_up(path, error)
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from None
        raise failure from error


def _given_up(unfinished: Path, error: BaseException) -> OSError:
    """What to say about a save that failed, of which nothing is left."""
    root = unfinished.parent
    free = shutil.disk_usage(root).free / 2**20
    shutil.rmtree(unfinished, ignore_errors=True)
    return OSError(f"{reason(error)}, with {free:.0f} MiB free in {root}")


def _publish(unfinished: Path, final: Path) -> None:
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(unfinished, final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


# ---- loading ----


def find_checkpoint(config: CheckpointConfig) -> Checkpoint | None:
    """The checkpoint that --load names, or None where there is none and that is allowed.

    Raises:
        ValueError: the step that was asked for is not there, or a file cannot be read.
    """
    assert config.load is not None
    root = Path(config.load)
    step = config.ckpt_step if config.ckpt_step is not None else _latest_step(root)
    if step is None:
        _require_no_other_checkpoint(root)
        if config.exit_on_missing_checkpoint:
            raise ValueError(f"--load {root} holds no checkpoint ({LATEST} is missing): check the path.")
        return None
    path = step_directory(root, step)
    if not path.exists():
        path = path.with_name(path.name + _REPLACED)
    if not (path / ".metadata").exists():
        saved = saved_steps(root) or "none"
        raise ValueError(f"{root} holds no checkpoint of step {step}: the steps saved there are {saved}.")
    return Checkpoint(path, _saved_progress(path))


def _saved_progress(path: Path) -> Progress:
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8", errors="replace"))
        progress = Progress(run["step"], run["consumed_samples"])
        if not all(type(count) is int and count >= 0 for count in (progress.step, progress.consumed_samples)):
            raise ValueError(f"step {progress.step}, consumed_samples {progress.consumed_samples}")
        require_saved_bytes(path, ["run.json"])
        return progress
    except ChangedError:
        raise ValueError(
            f"{path / 'run.json'} was changed after it was saved: restore it, or delete {CHECKSUMS} beside it to load "
            "unchecked."
        ) from None
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path / 'run.json'} cannot be read ({error}): resume from another step.") from None


def saved_steps(root: Path) -> list[int]:
    """The steps whose directories are in ``root``."""
    steps = (_number(path.name.removeprefix("iter_")) for path in root.glob("iter_*"))
    return sorted(step for step in steps if step is not None)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def later_steps(config: CheckpointConfig, step: int) -> list[str]:
    """What to say before a run that starts after ``step`` comes to steps that --save already holds."""
    steps = [] if config.save is None else saved_steps(Path(config.save))
    if not steps or steps[-1] <= step:
        return []
    start = f"starts after step {step}" if step else "counts from step 0"
    instead = "" if config.load == config.save else f" To continue them, give --load {config.save}."
    return [
        f"--save {config.save} holds checkpoints up to step {steps[-1]}, and this run {start}: it replaces each of "
        f"the later ones when it saves that step.{instead}"
    ]


def _require_no_other_checkpoint(root: Path) -> None:
    """Starting from scratch beside weights that were meant to be loaded would go unnoticed."""
    if (root / ".metadata").exists():
        raise ValueError(
            f"--load {root} is the checkpoint of one step: give {root.parent}, and the step by --ckpt-step."
        )
    if (root / "config.json").exists():
        raise ValueError(
            f"--load {root} holds a Hugging Face model, no checkpoint: pretrain_gpt reads it with --load-hf."
        )


def _latest_step(root: Path) -> int | None:
    path = root / LATEST
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if (step := _number(text)) is None:
        raise ValueError(f"{path} holds {text!r} instead of a step: write the step to resume from into it.")
    return step


def saved_options(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of the run that saved ``checkpoint``; empty where they cannot be read."""
    try:
        options = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    groups = options.items() if isinstance(options, dict) else ()
    return {name: group for name, group in groups if isinstance(group, dict)}


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, config: CheckpointConfig
) -> list[str]:
    """Load into the model, the optimizer and the random number generators what the flags ask for.

    Returns the trained parameters whose optimizer state the checkpoint lacks, and which therefore starts fresh.

    Raises:
        ValueError: the checkpoint is of another model (the first mismatches are named), or is damaged.
    """
    saved = _saved_entries(checkpoint.path)
    state: dict[str, Any] = {"model": model.state_dict()}
    _require_same_model(checkpoint.path, saved, state["model"])
    moments: dict[str, dict[str, Tensor]] = {}
    if config.load_optim and not config.finetune:
        moments = state["optimizer"] = _expected_moments(model, saved)
    if config.load_rng and not config.finetune:
        state["rng"] = {name: tensor for name, tensor in _rng_state().items() if f"rng.{name}" in saved}
    _read(checkpoint.path, {name: part for name, part in state.items() if part})
    load_optimizer_state(model, optimizer, moments)
    rng = state.get("rng", {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    wanted = [] if config.finetune or not config.load_optim else list(trained_parameters(model))
    return [name for name in wanted if name not in moments]


def _read(path: Path, state: STATE_DICT_TYPE) -> None:
    try:
        with _single_process_is_meant():
            dcp.load(state, storage_reader=Reader(path), no_dist=not _distributed())
    except (Exception, CheckpointException) as error:  # whatever a file, an unpickler or a zip archive raises
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(f"Checkpoint {path} is damaged ({reason(error)}): resume from another step.")


def _saved_entries(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the saved tensors by flattened name."""
    try:
        require_saved_bytes(path, [".metadata"])
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except (Exception, CheckpointException) as error:
        raise _damaged(path, error) from error
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _require_same_model(path: Path, saved: dict[str, tuple[int, ...]], model: dict[str, Tensor]) -> None:
    there = {name.removeprefix("model."): size for name, size in saved.items() if name.startswith("model.")}
    here = {name: tuple(tensor.shape) for name, tensor in model.items()}
    problems = [
        f"{name} is {list(there[name])} there and {list(here[name])} here"
        for name in here
        if name in there and there[name] != here[name]
    ]
    problems += [f"{name} is missing there" for name in here if name not in there]
    problems += [f"{name} exists only there" for name in there if name not in here]
    if problems:
        more = len(problems) - _SHOWN_MISMATCHES
        listed = "; ".join(problems[:_SHOWN_MISMATCHES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"Checkpoint {path} is of another model ({listed}): give the model flags it was made with, which "
            "its config.json lists."
        )


def _expected_moments(model: nn.Module, saved: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Tensor]]:
    """Empty moments of each trained parameter that the checkpoint has moments of."""
    moments = {}
    for name, parameter in trained_parameters(model).items():
        if f"optimizer.{name}.exp_avg" in saved:
            moments[name] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return moments
