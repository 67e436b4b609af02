"""Every contradiction in the data options has its sentence, and tyro can make flags of the fields."""

import ast
import inspect
from fractions import Fraction
from typing import Any

import pytest
import tyro

from megatron.training.data.config import DataConfig
from tests.unit_tests.training.data.sentences import one_sentence

GATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mock-and-data": (dict(mock_data=True, data_path=("A",)), ["--mock-data and --data-path", "drop one"]),
    "mock-and-train": (dict(mock_data=True, train_data_path=("A",)), ["--mock-data and --train-data-path"]),
    "two-sources": (dict(data_path=("A",), valid_data_path=("B",)), ["--data-path and --valid-data-path", "--split"]),
    "valid-alone": (dict(valid_data_path=("B",)), ["--valid-data-path was given without --train-data-path"]),
    "test-alone": (dict(test_data_path=("B",)), ["--test-data-path was given without --train-data-path"]),
    "split-alone": (dict(split="9,1"), ["--split was given without --data-path"]),
    "split-and-train": (dict(split="9,1", train_data_path=("A",)), ["--split was given without --data-path"]),
    "weights": (dict(data_path=("0.3", "A", "B")), ["--data-path got '0.3 A B'"]),
    "weights-test": (
        dict(train_data_path=("A",), test_data_path=("1", "A", "-2", "B")),
        ["--test-data-path gives B the weight -2"],
    ),
    "split-text": (dict(data_path=("A",), split="most"), ["--split is 'most'", "--split 969,30,1"]),
    "split-four": (dict(data_path=("A",), split="1,1,1,1"), ["up to three"]),
    "split-negative": (dict(data_path=("A",), split="9,-1"), ["none negative"]),
    "split-no-training": (dict(data_path=("A",), split="0,1"), ["the first positive"]),
    "split-nan": (dict(data_path=("A",), split="nan,1"), ["--split is 'nan,1'"]),
    "seq-length": (dict(seq_length=0), ["--seq-length is 0"]),
    "seed-negative": (dict(seed=-1), ["--seed is -1"]),
    "seed-large": (dict(seed=2**32), ["--seed is 4294967296"]),
    "workers": (dict(num_workers=-1), ["--num-workers is -1"]),
    "tokenizer": (dict(tokenizer_type="GPT2BPETokenizer"), ["'GPT2BPETokenizer'", "HuggingFaceTokenizer"]),
    "tokenizer-file": (dict(tokenizer_type="HuggingFaceTokenizer"), ["needs --tokenizer-model"]),
    "tokenizer-no-file": (dict(tokenizer_model="x"), ["ByteLevelTokenizer reads no file"]),
    "null-eod": (dict(tokenizer_type="NullTokenizer", eod_mask_loss=True), ["--eod-mask-loss", "NullTokenizer"]),
    "positions": (dict(reset_position_ids=True), ["without --reset-attention-mask"]),
}


@pytest.mark.parametrize("options,pieces", GATES.values(), ids=GATES.keys())
def test_gate(options: dict[str, Any], pieces: list[str]) -> None:
    with one_sentence(*pieces):
        DataConfig(**options)


ALLOWED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "mock": dict(mock_data=True),
    "own-sets": dict(train_data_path=("A",), valid_data_path=("B",), test_data_path=("C",)),
    "train-only": dict(train_data_path=("2", "A", "1", "B")),
    "split": dict(data_path=("A",), split="0.9, 0.1"),
    "packed": dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True),
    "seed": dict(seed=2**32 - 1),
}


@pytest.mark.parametrize("options", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_fits_together_is_allowed(options: dict[str, Any]) -> None:
    DataConfig(**options)


@pytest.mark.parametrize(
    "split,expected",
    [
        (None, (Fraction(969, 1000), Fraction(30, 1000), Fraction(1, 1000))),
        ("8,2", (Fraction(4, 5), Fraction(1, 5), Fraction(0))),
        ("7", (Fraction(1), Fraction(0), Fraction(0))),
        ("0.5,0.25,0.25", (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))),
    ],
)
def test_split_shares(split: str | None, expected: tuple[Fraction, Fraction, Fraction]) -> None:
    assert DataConfig(data_path=("A",), split=split).split_shares() == expected


def test_tyro_makes_flags_of_it() -> None:
    arguments = "--data-path 0.3 A 0.7 B --split 9,1 --seq-length 64 --reset-attention-mask --seed 5".split()
    expected = DataConfig(
        data_path=("0.3", "A", "0.7", "B"), split="9,1", seq_length=64, reset_attention_mask=True, seed=5
    )
    assert tyro.cli(DataConfig, args=arguments) == expected


def test_every_field_has_a_docstring_under_it() -> None:
    body = ast.parse(inspect.getsource(DataConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = 0
    for node, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign):
            fields += 1
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), ast.unparse(node)
    assert fields == len(DataConfig.__dataclass_fields__)
