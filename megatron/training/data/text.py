"""Where documents come from before they are tokens: text files, folders of them, JSONL, and Python's standard library.

A text file is one document; a line of JSONL is one. Documents come in the order of their names (files) or lines, so the
same input gives the same bytes on every machine. Files are read as they are, line endings included.

The standard library is the text that every machine with Python has: the `.py` files under sysconfig's `stdlib` path,
without installed packages and without tests, some megabytes of real source, which differ a little between versions.

A held-out set is chosen by name alone (CRC-32), so a document stays on its side when others come or go.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Source(NamedTuple):
    """A file to read, and its name: the path below the folder that was given."""

    name: str
    path: Path
    size: int

    @property
    def is_jsonl(self) -> bool:
        """Whether each line is a document; Megatron users call such files .json too."""
        return self.path.suffix in (".jsonl", ".json")


class Document(NamedTuple):
    """Texts by JSON key (a text file has the key `text`), and how many bytes of input they took."""

    name: str
    texts: dict[str, str]
    size: int


def is_held_out(name: str, one_in: int) -> bool:
    """Whether the document `name` belongs to the held-out set, one in `one_in` documents."""
    return zlib.crc32(os.fsencode(name)) % one_in == 0


def standard_library() -> list[Source]:
    """The `.py` files of the running Python's standard library.

    Raises:
        ValueError: this Python comes without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]  # not even looked into: some are huge
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    sources = _named(root, paths)
    if not sources:
        raise ValueError(f"{root} holds no .py files, so this Python has no library text: give files with --input.")
    return sources


def find_sources(inputs: Sequence[str], glob: str) -> list[Source]:
    """The files that `inputs` name: files themselves, folders through `glob`, or `stdlib`.

    Raises:
        ValueError: an input does not exist, or a folder holds no such file.
    """
    sources: list[Source] = []
    for item in inputs:
        path = Path(item)
        if item == STDLIB:
            sources += standard_library()
        elif path.is_dir():
            found = _below(path, glob)
            if not found:
                raise ValueError(f"{item} holds no file that matches {glob}: give another --glob, such as '**/*.py'.")
            sources += found
        elif path.is_file():
            sources.append(Source(path.name, path, path.stat().st_size))
        else:
            raise ValueError(f"{item} does not exist: give a text file, a .jsonl file, a folder or {STDLIB!r}.")
    return sources


def _below(root: Path, glob: str) -> list[Source]:
    try:
        paths = [path for path in root.glob(glob) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"--glob {glob!r} cannot be used below {root} ({error}): write it like '**/*.py'.") from error
    return _named(root, paths)


def _named(root: Path, paths: Sequence[Path]) -> list[Source]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    return [Source(name, path, path.stat().st_size) for name, path in named]


def cap(sources: Sequence[Source], max_bytes: int) -> list[Source]:
    """Some of `sources`, `max_bytes` together at most, in the order they had.

    The choice follows a hash of the names, so that it is even; another than `is_held_out`'s, so that both sets shrink.
    """
    chosen, used = set(), 0
    for source in sorted(sources, key=lambda source: hashlib.sha256(os.fsencode(source.name)).digest()):
        if used + source.size <= max_bytes:
            chosen.add(source)
            used += source.size
    return [source for source in sources if source in chosen]


def read_documents(sources: Sequence[Source], json_keys: Sequence[str]) -> Iterator[Document]:
    """Read the documents of `sources` one after another; one without texts stands for a file that is no UTF-8.

    Raises:
        ValueError: a line of a .jsonl file is no JSON object with the keys.
    """
    for source in sources:
        if source.is_jsonl:
            yield from _read_jsonl(source, json_keys)
            continue
        try:
            yield Document(source.name, {"text": source.path.read_bytes().decode("utf-8")}, source.size)
        except UnicodeDecodeError:
            yield Document(source.name, {}, source.size)


def _read_jsonl(source: Source, json_keys: Sequence[str]) -> Iterator[Document]:
    with open(source.path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{source.path}, line {number}, is no JSON ({error}): repair or drop the line."
                ) from error
            found = [values.get(key) for key in json_keys] if isinstance(values, dict) else []
            texts = [text for text in found if isinstance(text, str)]
            if len(texts) < len(json_keys):
                raise ValueError(
                    f"{source.path}, line {number}, is no object with a text under {', '.join(json_keys)}: name the "
                    "keys with --json-keys, or repair the line."
                )
            # JSON can spell halves of surrogate pairs, which are no text; they become question marks.
            clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
            yield Document(f"{source.name}:{number}", dict(zip(json_keys, clean, strict=True)), len(line))
