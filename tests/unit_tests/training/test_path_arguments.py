"""Paths that cannot be used are found by trying, and the trial leaves nothing behind."""

import os
from pathlib import Path

import pytest

from megatron.training.path_arguments import OneLineParser, path_text, require_writable

# No user, root included, can create anything there.
LOCKED = "/proc/run"


@pytest.mark.parametrize("name", ["", "new", "new/and/deeper"])
def test_a_directory_that_can_be_made_is_accepted_and_not_made(tmp_path: Path, name: str) -> None:
    require_writable("--save", tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_relative_places_count_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_writable("--save", "runs/a")
    assert os.listdir() == []


def test_steps_up_lead_out_of_no_trial(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    require_writable("--save", tmp_path / "here" / "new" / ".." / ".." / "beside")
    require_writable("--save", tmp_path / "here" / "new" / ".." / "other")
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize(
    ("place", "piece"),
    [
        (LOCKED, "--save /proc/run cannot be written to (No such file or directory in /proc): give a directory in a"),
        ("{root}/" + "a" * 300, "cannot be written to (File name too long in {root}): give a directory"),
        ("{root}/file", "--save {root}/file is a file: give a directory."),
        ("{root}/file/deeper", "--save {root}/file/deeper lies below {root}/file, which is a file: give a directory."),
        ("{root}/link/deeper", "cannot be written to (No such file or directory in {root}/link)"),
    ],
    ids=["locked", "long", "file", "below-a-file", "dangling-link"],
)
def test_other_places_are_refused_with_one_sentence(tmp_path: Path, place: str, piece: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"^[^\n]*\.$") as refusal:
        require_writable("--save", place.replace("{root}", str(tmp_path)))
    assert piece.replace("{root}", str(tmp_path)) in str(refusal.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_parser_complains_in_one_line_under_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="tool")
    command = parser.add_subparsers(parser_class=OneLineParser).add_parser("import")
    command.add_argument("--save", type=path_text)
    assert command.parse_args(["--save", "a b"]).save == "a b"
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["import", "--save="])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "tool: argument --save: an empty path names nothing: give a path.\n"
