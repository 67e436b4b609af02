"""What is deleted behind a newer checkpoint, what never is, and what a process killed meanwhile leaves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.training import retention
from megatron.training.checkpointing import LATEST, find_checkpoint
from megatron.training.config import CheckpointConfig
from megatron.training.retention import delete_older
from tests.unit_tests.training.deaths import Died, dies_at


def make(root: Path, *steps: int) -> None:
    """Checkpoints as far as files go; the last one is the latest."""
    for step in steps:
        path = root / f"iter_{step:07d}"
        path.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp", "config.json"):
            (path / name).write_text(name)
        (path / "checksums.json").write_text('{"block_bytes": 1, "files": {}}')
        (path / "run.json").write_text(json.dumps({"step": step, "consumed_samples": 4 * step}))
        (root / LATEST).write_text(str(step))


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def test_multiples_and_the_newest_stay(tmp_path: Path) -> None:
    make(tmp_path, 0, 2, 4, 5, 6, 7)
    assert delete_older(tmp_path, 4) == []
    assert steps(tmp_path) == [0, 4, 7]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[:5] != "iter_") == [LATEST]


def test_only_what_is_older_than_the_latest_goes(tmp_path: Path) -> None:
    """The run went on from an earlier step; what it left behind there is not its own to delete."""
    make(tmp_path, 6, 9, 3, 5)
    assert delete_older(tmp_path, 4) == []
    assert steps(tmp_path) == [5, 6, 9]


def test_without_a_whole_latest_checkpoint_nothing_goes(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    (tmp_path / LATEST).unlink()
    assert delete_older(tmp_path, 4) == [] and steps(tmp_path) == [1, 2]
    (tmp_path / LATEST).write_text("3")
    (warning,) = delete_older(tmp_path, 4)
    assert warning.startswith("No older checkpoint is deleted, because the latest cannot be read (")
    make(tmp_path, 3)
    (tmp_path / "iter_0000003/.metadata").unlink()
    assert len(delete_older(tmp_path, 4)) == 1 and steps(tmp_path) == [1, 2, 3]


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    make(elsewhere, 1)
    make(root, 2, 3, 5, 6, 7, 11)
    (root / "iter_0000001").symlink_to(elsewhere / "iter_0000001")
    (root / "iter_0000002/run.json").write_text('{"step": 7}')
    (root / "iter_0000003/notes.txt").write_text("the best one")
    (root / "iter_0000005/.metadata").unlink()
    (root / "iter_0000006/run.json").write_text("[]")
    (root / "iter_0000007/run.json").write_text('{"step": "7"}')
    (root / "iter_0000010").write_text("a file")
    shutil.copytree(elsewhere / "iter_0000001", root / "iter_1")
    shutil.copytree(elsewhere / "iter_0000001", root / "iter_0000001.kept")
    shutil.copytree(elsewhere / "iter_0000001", root / "mine" / "iter_0000001")
    before = sorted(tmp_path.rglob("*"))
    assert delete_older(root, 4) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name"), [(os, "rename"), (shutil, "rmtree"), (os, "unlink"), (os, "rmdir")])
def test_a_process_that_dies_meanwhile_leaves_the_latest_and_no_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: bool
) -> None:
    deaths = 0
    for call in range(1, 20):
        root = tmp_path / str(call)
        make(root, 1, 2, 3, 4, 6)
        with monkeypatch.context() as patch:
            calls = dies_at(patch, (module, name), call, after)
            try:
                delete_older(root, 4)
            except Died:
                deaths += 1
        newest = find_checkpoint(CheckpointConfig(load=str(root)))
        assert newest is not None and newest.progress.step == 6
        for step in steps(root):
            assert retention._is_checkpoint(root / f"iter_{step:07d}"), step
        assert {4, 6} <= set(steps(root))
        make(root, 8)
        assert delete_older(root, 4) == [] and steps(root) == [4, 8]
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
        if calls[0] < call:
            break
    assert deaths >= 3 and calls[0] < call


def test_a_failed_delete_is_a_warning_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1, 2, 3)

    def refuse(source: Path, target: Path) -> None:
        if source.name == "iter_0000001":
            raise PermissionError(13, "Permission denied")
        original(source, target)

    original = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert delete_older(tmp_path, 4) == [
            f"{tmp_path / 'iter_0000001'} cannot be deleted (Permission denied): the next save tries again."
        ]
    assert steps(tmp_path) == [1, 3]
    assert delete_older(tmp_path, 4) == [] and steps(tmp_path) == [3]


def test_a_delete_that_fails_half_way_names_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1, 2)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    left = tmp_path / ".deleted_iter_0000001"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert delete_older(tmp_path, 4) == [
            f"{left} cannot be deleted (Permission denied): the next save tries again."
        ]
    assert left.exists() and steps(tmp_path) == [2]
    assert delete_older(tmp_path, 4) == [] and not left.exists()
