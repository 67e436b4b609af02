"""A directory belongs to one run at a time, and to nobody once its holder is dead."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.run_lock import LOCK_FILE, held


def test_a_second_holder_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    holder = re.escape(f"process {os.getpid()} on {socket.gethostname()}")
    advice = rf"wait .*, or delete {tmp_path / LOCK_FILE} if no process of that host runs any more"
    with held({"--save": tmp_path}) as notices:
        assert notices == []
        with pytest.raises(
            BlockingIOError, match=rf"^--log-dir \S+ is in use by another run \({holder}\): {advice}\.$"
        ):
            with held({"--save": tmp_path / "other", "--log-dir": tmp_path}):
                pass
    assert list(tmp_path.iterdir()) == []
    with held({"--save": tmp_path}):
        pass


def test_one_directory_under_two_flags_is_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    with held({"--save": tmp_path / "a", "--log-dir": tmp_path / "link"}) as notices:
        assert notices == [] and (tmp_path / "a" / LOCK_FILE).exists()


def test_what_was_made_goes_only_while_it_is_empty(tmp_path: Path) -> None:
    with held({"--save": tmp_path / "a/b"}):
        pass
    assert list(tmp_path.iterdir()) == []
    with held({"--save": tmp_path / "a/b"}):
        (tmp_path / "a/mine").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


def test_a_dead_holder_blocks_nobody(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from megatron.training.run_lock import held\n"
        "with held({'--save': pathlib.Path(sys.argv[1])}): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError, match=f"process {process.pid} on"), held({"--save": tmp_path}):
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert (tmp_path / LOCK_FILE).exists()
    with held({"--save": tmp_path}) as notices:
        assert notices == []


def test_a_child_that_outlives_its_run_holds_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with held({"--save": tmp_path}):
        child = os.fork()
        if child == 0:
            os.write(writing, b"forked")
            time.sleep(60)
            os._exit(0)
        assert os.read(reading, 6) == b"forked"
        # A killed holder removes nothing.
        os.link(tmp_path / LOCK_FILE, tmp_path / "kept")
    os.rename(tmp_path / "kept", tmp_path / LOCK_FILE)
    try:
        with held({"--save": tmp_path}) as notices:
            assert notices == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_said_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held({"--save": tmp_path}) as notices:
        assert notices == [
            f"--save {tmp_path} cannot be locked (Operation not supported): nothing keeps another run out of it."
        ]
    assert list(tmp_path.iterdir()) == []


def test_where_no_lock_can_be_had_a_holder_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with held({"--save": tmp_path}):
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refuse)
            with held({"--save": tmp_path}) as notices:
                assert len(notices) == 1 and "No locks available" in notices[0]
        with pytest.raises(BlockingIOError), held({"--save": tmp_path}):
            pass


def of_another_user(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The file at ``path`` may be read by this process alone."""
    original, inode = os.open, path.stat().st_ino

    def open_(place: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR and not flags & os.O_EXCL and Path(place).stat().st_ino == inode:
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(place, flags, mode)

    monkeypatch.setattr(os, "open", open_)


def lock_as_nfs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exclusive lock takes a file that is open for writing."""
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if reads and operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("nfs", [False, True])
def test_the_run_of_another_user_is_in_the_way_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nfs: bool
) -> None:
    if nfs:
        lock_as_nfs_does(monkeypatch)
    with held({"--save": tmp_path}):
        of_another_user(monkeypatch, tmp_path / LOCK_FILE)
        with pytest.raises(BlockingIOError, match="is in use by another run"), held({"--save": tmp_path}):
            pass


@pytest.mark.parametrize(("sticky", "nfs"), [(False, False), (False, True), (True, False)])
def test_the_dead_run_of_another_user_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sticky: bool, nfs: bool
) -> None:
    if nfs:
        lock_as_nfs_does(monkeypatch)
    (tmp_path / LOCK_FILE).write_text("process 1 on nowhere")
    keep = os.open(tmp_path / LOCK_FILE, os.O_RDONLY)  # the number of the file is not used again
    of_another_user(monkeypatch, tmp_path / LOCK_FILE)
    if sticky:
        monkeypatch.setattr(Path, "unlink", lambda path: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no")))
    holder = "1 on nowhere" if sticky else str(os.getpid())
    with held({"--save": tmp_path}) as notices:
        assert notices == []
        with pytest.raises(BlockingIOError, match=f"process {holder}"), held({"--save": tmp_path}):
            pass
    os.close(keep)
