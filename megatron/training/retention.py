"""Which checkpoints of a run stay: those of every N-th step and the newest (``--save-retain-interval``).

Called after a save, by the first rank alone. Nothing goes before the file that names the latest step names a whole
checkpoint, and only older ones go. A directory goes if it is a checkpoint as ``checkpointing.py`` writes it, with
nothing else inside; whatever else lies there is not looked at. It is renamed before it is deleted, so that a process
killed in between leaves no half of a checkpoint under a checkpoint's name; the next save deletes what was left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from megatron.training.checkpointing import DELETED, find_checkpoint, saved_steps, step_directory
from megatron.training.config import CheckpointConfig

_FILES = re.compile(r"\.metadata|(config|run|checksums)\.json|.+\.distcp")


def delete_older(root: Path, interval: int) -> list[str]:
    """Delete the checkpoints before the latest whose step is no multiple of ``interval``.

    Returns a warning for each that cannot be deleted; the run does not depend on it.
    """
    try:
        newest = find_checkpoint(CheckpointConfig(load=str(root)))
    except (OSError, ValueError) as error:
        return [f"No older checkpoint is deleted, because the latest cannot be read ({error})."]
    if newest is None:
        return []
    warnings = []
    doomed = [
        step_directory(root, step) for step in saved_steps(root) if step < newest.progress.step and step % interval
    ]
    for path in [*root.glob(f"{DELETED}iter_*"), *filter(_is_checkpoint, doomed)]:
        try:
            path = _set_aside(path)
            shutil.rmtree(path)
        except OSError as error:
            warnings.append(f"{path} cannot be deleted ({error.strerror}): the next save tries again.")
    return warnings


def _is_checkpoint(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        step = json.loads((path / "run.json").read_text(encoding="utf-8"))["step"]
        named_so, names = path == step_directory(path.parent, step), os.listdir(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return named_so and ".metadata" in names and all(map(_FILES.fullmatch, names))


def _set_aside(path: Path) -> Path:
    if path.name.startswith(DELETED):
        return path
    aside = path.with_name(DELETED + path.name)
    os.rename(path, aside)
    return aside
