"""Paths as arguments of a command: empty ones, and directories that cannot be written to, found before any work."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, without the usage; the exit code is 2."""

    def error(self, message: str) -> NoReturn:
        """Say it under the program's name, which is also what a subcommand's parser speaks under."""
        print(f"{self.prog.split()[0]}: {message}", file=sys.stderr)
        sys.exit(2)


def path_text(text: str) -> str:
    """An argument's type: the text of a path, which an empty one (an unset variable of a script) is not."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path names nothing: give a path.")
    return text


def require_writable(flag: str, place: str | Path) -> None:
    """Check that a directory can be made at ``place``, or written to where it exists; nothing stays behind.

    Permissions do not tell (root has all of them, on read-only file systems too), so it is tried under another name.

    Raises:
        ValueError: one sentence with the system's reason.
    """
    path = _without_detours(Path(place).absolute())
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if existing.is_file():
        where = "is" if existing == path else f"lies below {existing}, which is"
        raise ValueError(f"{flag} {place} {where} a file: give a directory.")
    try:
        trial = Path(tempfile.mkdtemp(prefix=".trial_", dir=existing))
        try:
            (trial / path.relative_to(existing)).mkdir(parents=True, exist_ok=True)
        finally:
            shutil.rmtree(trial)
    except OSError as error:
        raise ValueError(
            f"{flag} {place} cannot be written to ({error.strerror} in {existing}): give a directory in a place where "
            "files can be created."
        ) from None


def _without_detours(path: Path) -> Path:
    """``path`` without steps into what does not exist and up again, which would lead out of the trial's directory."""
    kept = Path(path.anchor)
    for part in path.parts[1:]:
        kept = kept.parent if part == ".." and not os.path.lexists(kept) else kept / part
    return kept
