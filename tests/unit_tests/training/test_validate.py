"""Checks across options; most are met at the command line, see the functional tests."""

import dataclasses

import pytest
import torch

from megatron.core.models.gpt import get_preset
from megatron.training.arguments import PretrainConfig, parse_args
from megatron.training.validate import complete, device_of, require_memory, require_single_process
from tests.unit_tests.training.models import CONFIG

RUN = (
    "--preset tiny-glm5 --mock-data --seq-length 16 --micro-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 0"
).split()


def parsed(*flags: str) -> PretrainConfig:
    return parse_args([*RUN, *flags])


def test_derived_values_are_filled_in() -> None:
    config, tokenizer = complete(parsed("--vocab-size", "None", "--max-position-embeddings", "None"))
    assert config.training.global_batch_size == 2
    assert config.model.vocab_size == tokenizer.vocab_size == 257
    assert config.model.max_position_embeddings == 16


def test_given_values_stay() -> None:
    config, _ = complete(parsed("--vocab-size", "300", "--global-batch-size", "6"))
    assert (config.training.global_batch_size, config.model.vocab_size) == (6, 300)
    assert config.model.max_position_embeddings == get_preset("tiny-glm5").max_position_embeddings


REFUSED = [
    (["--seq-length", "5000"], "--seq-length 5000 exceeds --max-position-embeddings 4096"),
    (["--vocab-size", "256"], "--vocab-size 256 is smaller than the 257 tokens of ByteLevelTokenizer"),
    (["--tokenizer-type", "NullTokenizer", "--vocab-size", "None"], "NullTokenizer needs --vocab-size"),
    (["--lr-warmup-iters", "4"], "Warm-up takes 4 steps, but the schedule ends after 4"),
    (["--lr-warmup-iters", "3", "--lr-decay-iters", "3"], "Warm-up takes 3 steps, but the schedule ends after 3"),
    (["--save", __file__], "is a file: give a directory"),
    (["--tensorboard-dir", __file__], "is a file: give a directory"),
    (["--load", "nowhere"], "--load nowhere is no directory"),
    (["--load", "nowhere", "--save", "elsewhere"], "--load nowhere is no directory"),
]


@pytest.mark.parametrize(("flags", "piece"), REFUSED, ids=[" ".join(flags[:3]) for flags, _ in REFUSED])
def test_what_contradicts_itself_is_refused(flags: list[str], piece: str) -> None:
    with pytest.raises(ValueError, match=r"^.*\.$") as refusal:
        complete(parsed(*flags))
    assert piece in str(refusal.value)


def test_the_first_start_of_a_run_that_resumes_itself_is_allowed() -> None:
    complete(parsed("--load", "nowhere", "--save", "nowhere"))


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"])
def test_parallel_sizes_are_refused(name: str) -> None:
    model = dataclasses.replace(CONFIG, cp_comm_type="allgather", **{name: 2})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 2, but this version"):
        require_single_process(model, 1)
    with pytest.raises(ValueError, match="4 processes were started"):
        require_single_process(CONFIG, 4)
    require_single_process(CONFIG, 1)


def test_a_model_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The model has 74\d billion parameters, .* GiB: choose a smaller model\."):
        require_memory(dataclasses.replace(get_preset("glm-5"), bf16=True), torch.device("cpu"))
    require_memory(CONFIG, torch.device("cpu"))


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(parsed()) == device_of(parsed("--device", "cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="PyTorch finds no GPU"):
        device_of(parsed("--device", "cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of(parsed()) == torch.device("cuda", 3)
    assert device_of(parsed("--device", "cpu")) == torch.device("cpu")
