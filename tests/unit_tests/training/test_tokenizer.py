"""Tokenizers: ids of known texts, what the file of a Hugging Face tokenizer may leave out, and every refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer, NullTokenizer, build_tokenizer
from tests.unit_tests.training.data.sentences import one_sentence

WORDS = {"<unk>": 0, "hello": 1, "world": 2, "<s>": 3}


def tokenizer_json(folder: Path, special: tuple[str, ...] = ("<|endoftext|>",), **changes: Any) -> Path:
    """A word-level tokenizer whose template puts <s> before every text; ids of `special` follow, from 4 on."""
    added = [
        {"id": number, "content": content, "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
        | {"normalized": False}
        for number, content in [(3, "<s>"), *enumerate(special, start=4)]
    ]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": template,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | changes))
    return path


def ids(encoded: list[np.ndarray]) -> list[list[int]]:
    return [tokens.tolist() for tokens in encoded]


@given(st.text())
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteLevelTokenizer()
    (tokens,) = tokenizer.encode_batch([text])
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([*tokens.tolist(), tokenizer.eod]) == text


def test_bytes_that_are_no_text_decode_all_the_same() -> None:
    assert ByteLevelTokenizer().decode([0xC3, 65, 256, 300]) == "\ufffdA"
    assert (ByteLevelTokenizer.vocab_size, ByteLevelTokenizer.eod) == (257, 256)


def test_numbers_made_elsewhere() -> None:
    tokenizer = NullTokenizer(50)
    assert ids(tokenizer.encode_batch(["3 4  49", ""])) == [[3, 4, 49], []]
    assert tokenizer.decode([3, 4]) == "3 4" and tokenizer.eod is None and tokenizer.vocab_size == 50


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path)
    for tokenizer in (HuggingFaceTokenizer(file), HuggingFaceTokenizer(tmp_path)):
        assert ids(tokenizer.encode_batch(["hello world", "", "hello there"])) == [[1, 2], [], [1, 0]]
        assert (tokenizer.vocab_size, tokenizer.eod) == (5, 4)
        assert tokenizer.decode([1, 2, 4]) == "hello world"


def test_lengths_that_the_file_fixes_do_not_count(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    tokenizer = HuggingFaceTokenizer(tokenizer_json(tmp_path, truncation=truncation, padding=padding))
    assert ids(tokenizer.encode_batch(["hello world hello", "hello"])) == [[1, 2, 1], [1]]


@pytest.mark.parametrize("named", ["<end>", {"content": "<end>", "lstrip": False}], ids=["text", "object"])
def test_the_end_token_comes_from_the_configuration_beside(tmp_path: Path, named: Any) -> None:
    file = tokenizer_json(tmp_path, special=("<|endoftext|>", "<end>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert HuggingFaceTokenizer(file).eod == 5


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>"])
def test_well_known_end_tokens(tmp_path: Path, name: str) -> None:
    file = tokenizer_json(tmp_path, special=("<other>", name))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert HuggingFaceTokenizer(file).eod == 5


def test_ids_with_gaps_need_a_table_for_the_highest(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": WORDS | {"far": 90}, "unk_token": "<unk>"}
    tokenizer = HuggingFaceTokenizer(tokenizer_json(tmp_path, special=("</s>",), model=model))
    assert tokenizer.vocab_size == 91  # and not the number of tokens, 6


def test_what_cannot_be_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with one_sentence("--tokenizer-model zai-org/GLM-5 is neither", "names on the hub are not looked up"):
        HuggingFaceTokenizer("zai-org/GLM-5")
    with one_sentence("is neither a tokenizer.json nor a folder"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with one_sentence("tokenizer.json cannot be read as a tokenizer.json", "download it again"):
        HuggingFaceTokenizer(tmp_path)


def test_an_unknown_end_token_is_refused(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path, special=("<fin>",))
    with one_sentence("does not say which token ends a document", "<|endoftext|>", "tokenizer_config.json"):
        HuggingFaceTokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with one_sentence("looked for <end>"):
        HuggingFaceTokenizer(file)


def test_a_broken_configuration_beside_is_refused(tmp_path: Path) -> None:
    file = tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with one_sentence("tokenizer_config.json is no JSON object"):
        HuggingFaceTokenizer(file)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with one_sentence("needs the package tokenizers", "pip install tokenizers"):
        HuggingFaceTokenizer(tokenizer_json(tmp_path))


def test_the_package_is_imported_late() -> None:
    program = "import sys, megatron.training.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_build_tokenizer(tmp_path: Path) -> None:
    assert isinstance(build_tokenizer("ByteLevelTokenizer", None), ByteLevelTokenizer)
    assert build_tokenizer("NullTokenizer", None, 9).vocab_size == 9
    assert build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json(tmp_path))).eod == 4
    with one_sentence("NullTokenizer needs --vocab-size"):
        build_tokenizer("NullTokenizer", None)
