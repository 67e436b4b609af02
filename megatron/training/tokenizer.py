"""Tokenizers: text to token ids and back.

- `ByteLevelTokenizer`: UTF-8 bytes are ids 0 to 255, and 256 ends a document. Needs no file and knows every text.
- `HuggingFaceTokenizer`: any `tokenizer.json`, through the `tokenizers` package, which is imported when one is built.
  Special tokens that its template would put around a text are left out; what parts documents is the eod token.
- `NullTokenizer`: numbers made elsewhere; `vocab_size` of them, and no end-of-document token.

The vocabulary is not padded here: the model pads its embedding table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Names that end a document in well-known vocabularies, for a tokenizer.json without tokenizer_config.json beside it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
    """Text to token ids and back; `eod` is the id that ends a document, if there is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without an end-of-document token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without end-of-document tokens."""
        ...


class ByteLevelTokenizer:
    """One id a byte of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without an end-of-document token."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, and ids past 255 vanish."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")


class NullTokenizer:
    """Whole numbers below `vocab_size`, written with spaces between them."""

    eod = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text.

        Raises:
            ValueError: a text holds anything else, or a number that is not below `vocab_size`.
        """
        return [np.array([self._number(word) for word in text.split()], dtype=np.int64) for text in texts]

    def _number(self, word: str) -> int:
        if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
            raise ValueError(
                f"NullTokenizer got {word!r}, but it takes whole numbers from 0 to {self.vocab_size - 1} with spaces "
                "between them: raise --vocab-size, or choose a tokenizer for text."
            )
        return int(word)

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers with spaces between them."""
        return " ".join(str(int(token)) for token in ids)


class HuggingFaceTokenizer:
    """A `tokenizer.json`.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ValueError: the file is missing or unreadable, the package is missing, or nothing says what ends a document.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(
                f"--tokenizer-model {path} is neither a tokenizer.json nor a folder with one: give the path of a "
                "downloaded one (names on the hub are not looked up)."
            )
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ValueError(
                "--tokenizer-type HuggingFaceTokenizer needs the package tokenizers, which is not installed: "
                "pip install tokenizers."
            ) from error
        try:
            self._backend: Any = Backend.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            reason = str(error).replace(". ", ", ")
            raise ValueError(f"{file} cannot be read as a tokenizer.json ({reason}): download it again.") from error
        # Lengths that the file may fix for inference would cut documents off, or fill them up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod: int = self._find_eod(file)

    def _find_eod(self, file: Path) -> int:
        named = _named_eod(file.with_name("tokenizer_config.json"))
        for name in END_TOKENS if named is None else (named,):
            number = self._backend.token_to_id(name)
            if number is not None:
                return int(number)
        raise ValueError(
            f"{file} does not say which token ends a document (looked for {named or ', '.join(END_TOKENS)}): put a "
            "tokenizer_config.json beside it whose eos_token is one of its tokens."
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without special tokens; the package spreads the texts over its threads."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=True))


def _named_eod(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{config} is no JSON object: download it again, or remove it.") from error
    # Newer files hold the text, older ones an object that holds it.
    return named.get("content") if isinstance(named, dict) else named


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None = None) -> Tokenizer:
    """Make the tokenizer that the flags name; `vocab_size` counts the numbers of a NullTokenizer.

    Raises:
        ValueError: see the classes; or NullTokenizer without a vocabulary size.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if tokenizer_type == "HuggingFaceTokenizer":
        assert tokenizer_model is not None
        return HuggingFaceTokenizer(tokenizer_model)
    assert tokenizer_type == "NullTokenizer"
    if vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size: give the number of different tokens.")
    return NullTokenizer(vocab_size)
