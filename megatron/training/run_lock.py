"""One run at a time in a directory: an advisory lock (flock) that the operating system drops when its holder dies.

``.run.lock`` names the holder for whoever is refused, and is removed when the run ends. A run that is killed leaves the
file behind, without the lock; one of another user is replaced, so that it names who holds it now. Children that are
forked let go of it, so a reader that outlives its run blocks nobody. Some file systems take no locks: that is said, and
stops nothing. NFS may keep the lock of a node that died: then the file has to be deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOCK_FILE = ".run.lock"
_HELD_ELSEWHERE = {errno.EWOULDBLOCK, errno.EACCES}
_held: set[int] = set()


def _let_go() -> None:
    """In a forked child: what stays open here would keep the lock after its holder's death."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(folders: Mapping[str, Path]) -> Iterator[list[str]]:
    """Hold a directory for each flag, made where it is missing; yields what is to be said about those without locks.

    Directories that were made here and are still empty at the end are removed.

    Raises:
        BlockingIOError: another process holds one of them.
    """
    notices: list[str] = []
    with ExitStack() as stack:
        taken: list[Path] = []
        for flag, folder in folders.items():
            stack.enter_context(_made(folder))
            if any(folder.samefile(other) for other in taken):
                continue
            taken.append(folder)
            notices += stack.enter_context(_locked(flag, folder))
        yield notices


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it is in use now
            for path in missing:
                path.rmdir()


@contextmanager
def _locked(flag: str, folder: Path) -> Iterator[list[str]]:
    path = folder / LOCK_FILE
    try:
        descriptor = _lock(path)
    except OSError as error:
        yield [f"{flag} {folder} cannot be locked ({error.strerror}): nothing keeps another run out of it."]
        return
    if descriptor is None:
        raise BlockingIOError(
            f"{flag} {folder} is in use by another run ({_holder(path)}): wait until that has ended, give another "
            f"directory, or delete {path} if no process of that host runs any more."
        )
    _held.add(descriptor)
    try:
        with suppress(OSError):  # a full disk takes the lock, and no name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield []
    finally:
        _held.discard(descriptor)
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of the file that ``path`` names now, or None where another process does."""
    while True:
        descriptor, is_new = _open(path)
        try:
            _take(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _HELD_ELSEWHERE:
                return None
            if is_new:
                path.unlink(missing_ok=True)
            raise
        if _is_named(path, descriptor) and not _replaceable(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder removed it in between, or it is replaced


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, for reading alone where it is another user's, and whether it was made here."""
    with suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    except PermissionError:
        return os.open(path, os.O_RDONLY), False


def _take(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # all that NFS gives to who may only read


def _is_named(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _replaceable(path: Path, descriptor: int) -> bool:
    """Whether the file took no name of a holder, and is out of the way now."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        return False
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "it has just started"
    except OSError:
        return "it has just ended"
