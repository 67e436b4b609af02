"""Options of the data: where tokens come from, how they are cut into samples, and what may see what.

Flat and with Megatron's flag names, because the command line is made from these fields and shows their docstrings.
What contradicts itself is refused here, before anything is opened or created.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatron.training.data.blend import parse_blend

DEFAULT_SPLIT = "969,30,1"
TOKENIZER_TYPES = ("ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from and how they become batches."""

    data_path: tuple[str, ...] = ()
    """Prefixes of indexed token files (X for X.idx and X.bin), each optionally after its weight: 0.3 A 0.7 B. Cut into
    training, validation and test documents by --split."""
    train_data_path: tuple[str, ...] = ()
    """Prefixes for training alone, weighted as in --data-path; used instead of --data-path and --split."""
    valid_data_path: tuple[str, ...] = ()
    """Prefixes for validation alone; goes with --train-data-path."""
    test_data_path: tuple[str, ...] = ()
    """Prefixes for testing alone; goes with --train-data-path."""
    split: str | None = None
    """Proportions of training, validation and test documents within --data-path; 969,30,1 when unset."""
    mock_data: bool = False
    """Train on synthetic documents, in which each token follows from the one before, instead of files."""
    seq_length: int | None = None
    """Tokens of one sample."""
    seed: int = 1234
    """Seed of the documents' and samples' order (and of the model's initial weights)."""
    tokenizer_type: Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"] = "ByteLevelTokenizer"
    """UTF-8 bytes and an end-of-document token (257 ids), a Hugging Face tokenizer.json, or numbers made elsewhere
    (NullTokenizer: as many as --vocab-size says, no end-of-document token)."""
    tokenizer_model: str | None = None
    """HuggingFaceTokenizer: the tokenizer.json, or the folder that holds it."""
    reset_attention_mask: bool = False
    """Keep documents apart: a micro-batch becomes one packed row in which no token sees another document."""
    reset_position_ids: bool = False
    """Count positions from each document's start; always so with --reset-attention-mask, and only possible there."""
    eod_mask_loss: bool = False
    """Leave out of the loss what is predicted from an end-of-document token, which is the next document's start."""
    num_workers: int = 0
    """Processes that read ahead; 0 reads in the training process, which is fast enough for local files."""

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_values()
        self._check_tokenizer()
        if self.reset_position_ids and not self.reset_attention_mask:
            raise ValueError(
                "--reset-position-ids was given without --reset-attention-mask, but positions restart only where "
                "documents are kept apart: add --reset-attention-mask or leave it out."
            )

    def _check_sources(self) -> None:
        per_split = {
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
        }
        given = [flag for flag, items in {"--data-path": self.data_path, **per_split}.items() if items]
        if self.mock_data and given:
            raise ValueError(f"--mock-data and {given[0]} were both given, but data come from one source: drop one.")
        if self.data_path and len(given) > 1:
            raise ValueError(
                f"--data-path and {given[1]} were both given: either cut --data-path with --split, or name the sets "
                "with --train-data-path, --valid-data-path and --test-data-path."
            )
        if given and not self.data_path and not self.train_data_path:
            raise ValueError(f"{given[0]} was given without --train-data-path: add it, or use --data-path.")
        if self.split is not None and not self.data_path:
            raise ValueError("--split was given without --data-path, which is all that it cuts: drop it.")
        for flag, items in {"--data-path": self.data_path, **per_split}.items():
            parse_blend(flag, items)
        self.split_shares()

    def _check_values(self) -> None:
        if self.seq_length is not None and self.seq_length < 1:
            raise ValueError(f"--seq-length is {self.seq_length}, but a sample has at least 1 token: raise it.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed is {self.seed}, but seeds go from 0 to 4294967295: choose one of those.")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers is {self.num_workers}, but it counts processes: give 0 or more.")

    def _check_tokenizer(self) -> None:
        if self.tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(
                f"--tokenizer-type is {self.tokenizer_type!r}, but only {', '.join(TOKENIZER_TYPES)} are supported: "
                "turn the tokenizer into a Hugging Face tokenizer.json and give HuggingFaceTokenizer."
            )
        if self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: give its tokenizer.json.")
        if self.tokenizer_type != "HuggingFaceTokenizer" and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-model was given, but {self.tokenizer_type} reads no file: drop it, or give "
                "--tokenizer-type HuggingFaceTokenizer."
            )
        if self.tokenizer_type == "NullTokenizer" and self.eod_mask_loss:
            raise ValueError(
                "--eod-mask-loss was given, but NullTokenizer has no end-of-document token: drop it, or name the "
                "tokenizer that made the data."
            )

    def split_shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Shares of the training, validation and test documents; they add up to 1.

        Raises:
            ValueError: `split` is not one to three numbers of which the first is positive and none negative.
        """
        text = DEFAULT_SPLIT if self.split is None else self.split
        try:
            parts = [Fraction(part.strip()) for part in text.split(",")]
        except (ValueError, ZeroDivisionError):
            parts = []
        if not 1 <= len(parts) <= 3 or parts[0] <= 0 or min(parts) < 0:
            raise ValueError(
                f"--split is {text!r}, but it takes up to three proportions (training, validation, test), none "
                f"negative and the first positive: write for instance --split {DEFAULT_SPLIT}."
            )
        padded = parts + [Fraction(0)] * (3 - len(parts))
        total = sum(padded)
        return padded[0] / total, padded[1] / total, padded[2] / total
