"""The preprocessing command: what it writes, what it refuses, and that nothing half-written stays."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.training import preprocess_data
from megatron.training.data.indexed import IndexedDataset
from megatron.training.data.text import is_held_out
from megatron.training.preprocess_data import main
from tests.unit_tests.training.test_tokenizer import tokenizer_json


def documents(prefix: Path | str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.read_document(i, 0, n).tolist() for i, n in enumerate(data.document_lengths().tolist())]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    for name, text in {"b.py": "bé", "a.py": "a", "empty.py": "", "c.txt": "c"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_of_files(tree: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input", str(tree), "--glob", "**/*.py", "--output-prefix", f"{out}/y", "--append-eod"]) == 0
    assert files(out) == ["y_text_document.bin", "y_text_document.idx"]
    assert documents(out / "y_text_document") == [[97, 256], [98, 0xC3, 0xA9, 256]]
    assert IndexedDataset(out / "y_text_document").dtype == np.uint16
    assert capsys.readouterr().out == f"{out}/y_text_document: 2 documents, 6 tokens\n"


def test_without_append_eod(tree: Path, out: Path) -> None:
    assert main(["--input", str(tree / "b.py"), str(tree / "c.txt"), "--output-prefix", f"{out}/y"]) == 0
    assert documents(out / "y_text_document") == [[98, 0xC3, 0xA9], [99]]


def test_jsonl_gets_files_for_each_key(tmp_path: Path, out: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "ab", "title": "T"}\n{"text": "", "title": "U"}\n')
    arguments = ["--input", str(tmp_path / "d.jsonl"), "--output-prefix", f"{out}/y", "--json-keys", "text", "title"]
    assert main(arguments) == 0
    assert documents(out / "y_text_document") == [[97, 98]]
    assert documents(out / "y_title_document") == [[84], [85]]


def test_a_hugging_face_tokenizer(tmp_path: Path, out: Path) -> None:
    (tmp_path / "d.txt").write_text("hello world")
    tokenizer = str(tokenizer_json(tmp_path))
    arguments = ["--input", str(tmp_path / "d.txt"), "--output-prefix", f"{out}/y", "--append-eod", "--workers", "2"]
    assert main([*arguments, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]) == 0
    assert documents(out / "y_text_document") == [[1, 2, 4]]


def test_numbers_made_elsewhere(tmp_path: Path, out: Path) -> None:
    (tmp_path / "d.txt").write_text("5 99999\n7")
    arguments = ["--input", str(tmp_path / "d.txt"), "--output-prefix", f"{out}/y"]
    assert main([*arguments, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]) == 0
    assert documents(out / "y_text_document") == [[5, 99999, 7]]


def test_a_held_out_set_is_chosen_by_name(tmp_path: Path, out: Path) -> None:
    lines = [json.dumps({"text": f"{number:03d}"}) for number in range(60)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    arguments = ["--input", str(tmp_path / "d.jsonl"), "--output-prefix", f"{out}/y", "--held-out-one-in", "4"]
    assert main(arguments) == 0
    training = [bytes(d).decode() for d in documents(out / "y_train_text_document")]
    held = [bytes(d).decode() for d in documents(out / "y_valid_text_document")]
    assert len(files(out)) == 4
    assert held == [f"{n:03d}" for n in range(60) if is_held_out(f"d.jsonl:{n + 1}", 4)] and 5 < len(held) < 25
    assert sorted(training + held) == [f"{n:03d}" for n in range(60)]


def test_large_input_goes_through_in_batches(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 2)
    (tree / "z.txt").write_bytes(b"\xff")
    assert main(["--input", str(tree), "--glob", "*", "--output-prefix", f"{out}/y"]) == 0
    assert documents(out / "y_text_document") == [[97], [98, 0xC3, 0xA9], [99]]
    assert "skipped 1 files that are not UTF-8" in capsys.readouterr().out


def test_the_standard_library(out: Path) -> None:
    arguments = ["--input", "stdlib", "--max-bytes", "400000", "--output-prefix", f"{out}/lib", "--append-eod"]
    assert main(arguments) == 0
    training, held = documents(out / "lib_train_text_document"), documents(out / "lib_valid_text_document")
    assert len(training) > 5 * len(held) > 0
    assert 300_000 < sum(map(len, training + held)) - len(training + held) <= 400_000
    assert all(d[-1] == 256 and max(d[:-1]) < 256 for d in training + held)


def test_one_set_from_the_standard_library(out: Path) -> None:
    arguments = ["--input", "stdlib", "--max-bytes", "50000", "--output-prefix", f"{out}/lib"]
    assert main([*arguments, "--held-out-one-in", "0"]) == 0
    assert files(out) == ["lib_text_document.bin", "lib_text_document.idx"]


BAD_FLAGS = {
    "no-input": (["--output-prefix", "OUT/y"], "--input"),
    "no-prefix": (["--input", "TREE"], "--output-prefix"),
    "unknown": (["--input", "TREE", "--output-prefix", "OUT/y", "--colour", "red"], "unrecognized arguments: --colour"),
    "abbreviated": (["--inp", "TREE", "--output-prefix", "OUT/y"], "--input"),
    "no-number": (["--input", "TREE", "--output-prefix", "OUT/y", "--workers", "two"], "invalid int value: 'two'"),
    "workers": (["--input", "TREE", "--output-prefix", "OUT/y", "--workers", "0"], "--workers is 0, but 1"),
    "max-bytes": (["--input", "TREE", "--output-prefix", "OUT/y", "--max-bytes", "0"], "--max-bytes is 0, but 1"),
    "held-out": (["--input", "TREE", "--output-prefix", "OUT/y", "--held-out-one-in", "-1"], "--held-out-one-in is -1"),
    "all-held-out": (["--input", "TREE", "--output-prefix", "OUT/y", "--held-out-one-in", "1"], "every document"),
    "absent-input": (["--input", "TREE/x", "--output-prefix", "OUT/y"], "tree/x does not exist"),
    "no-match": (["--input", "TREE", "--glob", "*.md", "--output-prefix", "OUT/y"], "no file that matches *.md"),
    "mixed": (["--input", "TREE/c.txt", "TREE/d.jsonl", "--output-prefix", "OUT/y"], "mixes .jsonl files and text"),
    "cap-jsonl": (["--input", "TREE/d.jsonl", "--max-bytes", "9", "--output-prefix", "OUT/y"], "chooses among text"),
    "cap-low": (["--input", "TREE/b.py", "--max-bytes", "1", "--output-prefix", "OUT/y"], "smallest file's 3 bytes"),
    "absent-folder": (["--input", "TREE", "--output-prefix", "OUT/x/y"], "no folder: create it first"),
    "prefix-is-folder": (["--input", "TREE", "--output-prefix", "OUT"], "is a folder: add the beginning"),
    "prefix-ends-folder": (["--input", "TREE", "--output-prefix", "OUT/z/"], "is a folder: add the beginning"),
    "tokenizer": (["--input", "TREE", "--output-prefix", "OUT/y", "--tokenizer-type", "BPE"], "'BPE', but only"),
    "no-model": (
        ["--input", "TREE", "--output-prefix", "OUT/y", "--tokenizer-type", "HuggingFaceTokenizer"],
        "needs --tokenizer-model",
    ),
    "vocab": (["--input", "TREE", "--output-prefix", "OUT/y", "--vocab-size", "9"], "knows its own: drop it"),
    "null": (["--input", "TREE", "--output-prefix", "OUT/y", "--tokenizer-type", "NullTokenizer"], "--vocab-size"),
    "null-eod": (
        ["--input", "TREE", "--output-prefix", "OUT/y", "--append-eod"]
        + ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
        "has no end-of-document token",
    ),
}


@pytest.mark.parametrize("arguments,piece", BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_bad_flags_end_with_one_sentence(
    tree: Path, out: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], piece: str
) -> None:
    (tree / "d.jsonl").write_text('{"text": "x"}')
    with pytest.raises(SystemExit) as stopped:
        main([argument.replace("TREE", str(tree)).replace("OUT", str(out)) for argument in arguments])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    assert piece in said.err and said.err.startswith("preprocess_data: ") and said.err.count("\n") == 1
    assert files(out) == []


def test_a_folder_that_cannot_be_written_to(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--input", str(tree), "--output-prefix", "/proc/y"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith("preprocess_data: The folder of --output-prefix /proc cannot be written to (")


BAD_INPUT = {
    "bad-line": ('{"text": "fine"}\n{"text":', [], "line 2, is no JSON"),
    "no-text": ('{"text": ""}\n', [], "y_text_document would hold no document"),
    "none-held-out": ('{"text": "x"}\n', ["--held-out-one-in", "1000"], "valid_text_document would hold no document"),
    "number": ('{"text": "70 x"}', ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"], "whole numbers"),
    "large": (
        '{"text": "1 99"}',
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"],
        "'99', but it takes whole numbers from 0 to 98",
    ),
}


@pytest.mark.parametrize("content,more,piece", BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_leaves_nothing(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], content: str, more: list[str], piece: str
) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    assert main(["--input", str(tmp_path / "d.jsonl"), "--output-prefix", f"{out}/y", *more]) == 1
    said = capsys.readouterr()
    assert said.out == "" and piece in said.err and said.err.count("\n") == 1
    assert files(out) == []


def test_bad_input_leaves_an_older_result(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text('{"text": "old"}')
    arguments = ["--input", str(source), "--output-prefix", f"{out}/y"]
    assert main(arguments) == 0
    source.write_text('{"text": "new"}\n{')
    assert main(arguments) == 1
    assert documents(out / "y_text_document") == [list(b"old")] and len(files(out)) == 2
    source.write_text('{"text": "newer"}')
    assert main(arguments) == 0
    assert documents(out / "y_text_document") == [list(b"newer")] and len(files(out)) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_run_leaves_nothing(tmp_path: Path, out: Path, number: signal.Signals) -> None:
    """A pipe as input stops the run in the middle: its first lines are written, the rest never comes."""
    pipe = tmp_path / "d.jsonl"
    pipe.write_text('{"text": "x"}')
    program = [
        "import runpy, sys, time",
        "from megatron.training.data import text",
        "def stuck(source, keys):",
        "    yield text.Document('a', {'text': 'x' * 3000000}, 3000000)",
        "    print('written', flush=True)",
        "    time.sleep(60)",
        "text._read_jsonl = stuck",
        "sys.argv[0] = 'preprocess_data'",
        "runpy.run_module('megatron.training.preprocess_data', run_name='__main__')",
    ]
    command = [sys.executable, "-c", "\n".join(program), "--input", str(pipe), "--output-prefix", f"{out}/y"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "written\n"
        assert [name for name in files(out) if name.endswith(".tmp")] and os.path.getsize(next(out.iterdir())) > 0
        run.send_signal(number)
        code = run.wait(timeout=30)
    if number == signal.SIGKILL:
        assert code == -9 and [name for name in files(out) if not name.endswith(".tmp")] == []
    else:
        assert code == 128 + number and files(out) == []


def test_the_command_itself(tree: Path, out: Path) -> None:
    command = [sys.executable, "-m", "megatron.training.preprocess_data", "--input", str(tree / "a.py")]
    done = subprocess.run([*command, "--output-prefix", f"{out}/y"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    failed = subprocess.run([*command, "--output-prefix"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
