"""Where documents come from: names, order, what is skipped, and what is refused."""

import sysconfig
from pathlib import Path

import pytest

from megatron.training.data import text
from megatron.training.data.text import Source, cap, find_sources, is_held_out, read_documents, standard_library
from tests.unit_tests.training.data.sentences import one_sentence


def names(sources: list[Source]) -> list[str]:
    return [source.name for source in sources]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a/z.py", "a/y.py", "a/x.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}\n")
    return tmp_path


def test_a_folder_is_read_in_the_order_of_names(tree: Path) -> None:
    assert names(find_sources([str(tree)], "**/*.py")) == ["a/y.py", "a/z.py", "b.py"]
    assert names(find_sources([str(tree)], "*.txt")) == ["c.txt"]
    documents = list(read_documents(find_sources([str(tree)], "**/*.txt"), ["text"]))
    assert [document.texts["text"] for document in documents] == ["this is a/x.txt\n", "this is c.txt\n"]
    assert [document.size for document in documents] == [16, 14]


def test_several_inputs_keep_their_order(tree: Path) -> None:
    inputs = [str(tree / "c.txt"), str(tree / "a"), str(tree / "b.py")]
    assert names(find_sources(inputs, "*.py")) == ["c.txt", "y.py", "z.py", "b.py"]


def test_texts_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ä\r\nb\r".encode())
    (document,) = read_documents(find_sources([str(tmp_path / "a.txt")], "*"), ["text"])
    assert document.texts == {"text": "ä\r\nb\r"}


def test_files_that_are_no_text_have_no_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (document,) = read_documents(find_sources([str(tmp_path)], "*"), ["text"])
    assert document.texts == {} and document.size == 2


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_jsonl(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"d.{suffix}"
    file.write_text('{"text": "one", "title": "1", "n": 3}\n\n{"text": "\\ud800two", "title": ""}')
    documents = list(read_documents(find_sources([str(file)], "*"), ["text", "title"]))
    assert [document.texts for document in documents] == [
        {"text": "one", "title": "1"},
        {"text": "?two", "title": ""},
    ]
    assert [document.name for document in documents] == [f"d.{suffix}:1", f"d.{suffix}:3"]


BAD_LINES = {
    "cut": ('{"text": "o', ["line 2, is no JSON", "repair or drop"]),
    "latin-1": (b'{"text": "\xe4"}', ["line 2, is no JSON"]),
    "list": ('["text"]', ["line 2, is no object with a text under text"]),
    "no-key": ('{"content": "x"}', ["line 2, is no object with a text under text", "--json-keys"]),
    "no-text": ('{"text": 3}', ["line 2, is no object"]),
}


@pytest.mark.parametrize("line,pieces", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_lines_that_are_no_documents_are_refused(tmp_path: Path, line: str | bytes, pieces: list[str]) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n' + raw + b"\n")
    with one_sentence("d.jsonl", *pieces):
        list(read_documents(find_sources([str(tmp_path / "d.jsonl")], "*"), ["text"]))


def test_what_is_not_there_is_refused(tree: Path) -> None:
    with one_sentence("absent does not exist", "'stdlib'"):
        find_sources([str(tree / "absent")], "*")
    with one_sentence("holds no file that matches **/*.md", "--glob"):
        find_sources([str(tree)], "**/*.md")
    with one_sentence("--glob '/x/*.py' cannot be used"):
        find_sources([str(tree)], "/x/*.py")


def test_the_standard_library_is_whole_and_alone() -> None:
    found = names(standard_library())
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    assert found == sorted(found) and all(name.endswith(".py") for name in found)
    folders = {folder for name in found for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert find_sources(["stdlib"], "*.none") == standard_library()


def test_installed_packages_and_tests_are_no_library(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("site-packages/p.py", "test/t.py", "json/tests/t.py", "json/j.py", "testing.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tree)}.get)
    assert names(standard_library()) == ["a/y.py", "a/z.py", "b.py", "json/j.py", "testing.py"]


def test_a_python_without_its_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    with one_sentence("holds no .py files", "--input"):
        standard_library()


def test_documents_are_held_out_by_name_alone() -> None:
    held = [name for name in (f"m{i}.py" for i in range(2000)) if is_held_out(name, 20)]
    assert held[:3] == ["m6.py", "m30.py", "m46.py"]  # written down: held-out files must never move into training
    assert 70 < len(held) < 130
    assert is_held_out("\udcff.py", 1)  # a name that is no UTF-8


def test_a_cap_takes_an_even_choice() -> None:
    sources = [Source(f"{i // 100}/m{i}.py", Path("x"), 10) for i in range(1000)]
    chosen = cap(sources, 2005)
    assert len(chosen) == 200 and chosen == [source for source in sources if source in set(chosen)]
    assert all(8 <= sum(name.startswith(f"{i}/") for name in names(chosen)) <= 35 for i in range(10))
    held = sum(is_held_out(name, 5) for name in names(chosen))
    assert 20 < held < 60
    assert set(chosen) < set(cap(sources, 4000))
    assert cap(sources, 9) == []


def test_a_cap_passes_over_what_is_too_large() -> None:
    sources = [Source("large", Path("x"), 100), Source("a", Path("x"), 3), Source("b", Path("x"), 4)]
    assert names(cap(sources, 7)) == ["a", "b"]
    assert text.STDLIB == "stdlib"
