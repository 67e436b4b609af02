"""Turn text into indexed token files: `python -m megatron.training.preprocess_data --input X --output-prefix Y`.

Writes `Y_text_document.bin` and `.idx`, named as Megatron names them (prefix, JSON key, "document"); with a held-out
set, `Y_train_text_document` and `Y_valid_text_document`. The files get these names when everything is written: an
error, Ctrl-C or SIGTERM leaves nothing behind, SIGKILL at most temporary names (`*.tmp`).

Wrong flags end with one sentence and exit code 2 before anything is created, unusable input with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from megatron.training.data.config import TOKENIZER_TYPES, DataConfig
from megatron.training.data.indexed import IndexedDatasetBuilder, dtype_for_vocab
from megatron.training.data.text import STDLIB, Document, Source, cap, find_sources, is_held_out, read_documents
from megatron.training.path_arguments import OneLineParser, path_text, require_writable
from megatron.training.tokenizer import Tokenizer, build_tokenizer

BATCH_BYTES = 1 << 20
STDLIB_HELD_OUT_ONE_IN = 20


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="preprocess_data",
        description="Turn text into Megatron's indexed token files.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        type=path_text,
        nargs="+",
        required=True,
        metavar="X",
        help="text files (a document each), .jsonl files (a document a line), folders, or "
        f"'{STDLIB}': the source of this Python's standard library",
    )
    group.add_argument(
        "--glob",
        metavar="PATTERN",
        default="**/*.txt",
        help="which files below a folder are read (default: %(default)s)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of .jsonl; each gets files of its own (default: text)",
    )
    group.add_argument(
        "--max-bytes", type=int, metavar="N", help="read an even choice of the files, this many bytes together"
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        metavar="NAME",
        default=TOKENIZER_TYPES[0],
        help=f"one of {', '.join(TOKENIZER_TYPES)} (default: %(default)s)",
    )
    group.add_argument(
        "--tokenizer-model", type=path_text, metavar="PATH", help="HuggingFaceTokenizer: a tokenizer.json or its folder"
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="NullTokenizer: the number of different tokens")
    group.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    group.add_argument(
        "--workers", type=int, metavar="N", default=1, help="threads of HuggingFaceTokenizer (default: 1)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix", type=path_text, metavar="PREFIX", required=True, help="path that the files' names begin with"
    )
    group.add_argument(
        "--held-out-one-in",
        type=int,
        metavar="N",
        help="hold out one document in N, chosen by name, and write _train_ and _valid_ files "
        f"({STDLIB_HELD_OUT_ONE_IN} for {STDLIB} when unset, otherwise none; 0 for none)",
    )
    return parser


def _check_numbers(args: argparse.Namespace) -> None:
    for name, lowest in (("workers", 1), ("max_bytes", 1), ("vocab_size", 1), ("held_out_one_in", 0)):
        value = getattr(args, name)
        if value is not None and value < lowest:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but {lowest} is the least: raise it.")
    if args.held_out_one_in == 1:
        raise ValueError("--held-out-one-in 1 holds out every document: give 2 or more, or 0 for no held-out set.")


def _check_output(prefix: str) -> None:
    folder = Path(prefix).parent
    if prefix.endswith("/") or Path(prefix).is_dir():
        raise ValueError(f"--output-prefix {prefix} is a folder: add the beginning of a file name.")
    if not folder.is_dir():
        raise ValueError(f"--output-prefix {prefix} lies in {folder}, which is no folder: create it first.")
    require_writable("The folder of --output-prefix", folder)


def _checked_tokenizer(args: argparse.Namespace) -> Tokenizer:
    DataConfig(tokenizer_type=args.tokenizer_type, tokenizer_model=args.tokenizer_model)  # for its checks
    if args.vocab_size is not None and args.tokenizer_type != "NullTokenizer":
        raise ValueError(f"--vocab-size was given, but {args.tokenizer_type} knows its own: drop it.")
    # Read by the tokenizers package when it first uses threads.
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if args.append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod was given, but {args.tokenizer_type} has no end-of-document token: drop it.")
    return tokenizer


def _checked_sources(args: argparse.Namespace) -> list[Source]:
    sources = find_sources(args.input, args.glob)
    if args.max_bytes is not None:
        jsonl = [source.path for source in sources if source.is_jsonl]
        if jsonl:
            raise ValueError(f"--max-bytes chooses among text files, but {jsonl[0]} is JSONL: drop one of the two.")
        size = min(source.size for source in sources)
        sources = cap(sources, args.max_bytes)
        if not sources:
            raise ValueError(f"--max-bytes {args.max_bytes} is less than the smallest file's {size} bytes: raise it.")
    if len({source.is_jsonl for source in sources}) > 1:
        raise ValueError(
            "--input mixes .jsonl files and text files, whose keys differ: convert them one after another."
        )
    return sources


def _batched(documents: Iterator[Document], progress: tqdm) -> Iterator[list[Document]]:
    """Enough documents at a time to keep the tokenizer's threads busy."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        progress.update(document.size)
        size += document.size
        batch.append(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


class _Output:
    """The files being written: one pair a set and JSON key."""

    def __init__(self, prefix: str, keys: Sequence[str], one_in: int, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer, self._one_in = tokenizer, one_in
        self._end = np.array([tokenizer.eod] if append_eod else [], dtype=np.int64)
        self._dtype = dtype_for_vocab(tokenizer.vocab_size)
        sets = ("_train", "_valid") if one_in else ("",)
        self._prefixes = {
            (held, key): f"{prefix}{name}_{key}_document" for held, name in enumerate(sets) for key in keys
        }
        self.builders: dict[tuple[int, str], IndexedDatasetBuilder] = {}
        self.skipped = 0

    def open(self, stack: ExitStack) -> None:
        for place, prefix in self._prefixes.items():
            self.builders[place] = stack.enter_context(IndexedDatasetBuilder(prefix, self._dtype))

    def write(self, documents: Sequence[Document]) -> None:
        self.skipped += sum(not document.texts for document in documents)
        documents = [document for document in documents if document.texts]
        for key in {key for _, key in self.builders}:
            encoded = self._tokenizer.encode_batch([document.texts[key] for document in documents])
            for document, tokens in zip(documents, encoded, strict=True):
                held = int(self._one_in > 0 and is_held_out(document.name, self._one_in))
                if tokens.size:
                    self.builders[held, key].add_document(np.concatenate([tokens, self._end]))


def preprocess(args: argparse.Namespace, sources: Sequence[Source], tokenizer: Tokenizer) -> list[str]:
    """Write the files; returns a line about each pair, after one about what was skipped.

    Raises:
        ValueError: the input has nothing to write, or cannot be read.
    """
    keys = args.json_keys if sources[0].is_jsonl else ["text"]
    one_in = args.held_out_one_in
    if one_in is None:
        one_in = STDLIB_HELD_OUT_ONE_IN if STDLIB in args.input else 0
    output = _Output(args.output_prefix, keys, one_in, tokenizer, args.append_eod)
    total = sum(source.size for source in sources)
    with ExitStack() as stack:
        output.open(stack)
        # disable=None: a bar on a terminal, and silence in a log.
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None) as progress:
            for documents in _batched(read_documents(sources, keys), progress):
                output.write(documents)
        for builder in output.builders.values():
            if builder.num_documents == 0:
                raise ValueError(
                    f"{builder.path_prefix} would hold no document: give input with UTF-8 text, or another "
                    "--held-out-one-in."
                )
    report = [f"skipped {output.skipped:,} files that are not UTF-8"] if output.skipped else []
    return report + [
        f"{builder.path_prefix}: {builder.num_documents:,} documents, {builder.num_tokens:,} tokens"
        for builder in output.builders.values()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        _check_numbers(args)
        _check_output(args.output_prefix)
        tokenizer = _checked_tokenizer(args)
        sources = _checked_sources(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        print("\n".join(preprocess(args, sources, tokenizer)))
    except (OSError, ValueError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    return 0


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # through the `with` blocks, which remove what was written


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    sys.exit(main())
