"""Checks across options; most are met at the command line, see the functional tests."""

import dataclasses

import pytest
import torch

from megatron.core.models.gpt import get_preset
from megatron.core.parallel_state import ParallelSizes
from megatron.training.arguments import PretrainConfig, parse_args
from megatron.training.validate import complete, device_of, require_kernels, require_memory, require_parallel
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


TP, CP, EP = "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
UNPARALLEL: list[tuple[int, dict[str, object], str]] = [
    (1, {TP: 2}, "1 processes do not split into tensor_model_parallel_size=2"),
    (6, {TP: 2, CP: 2}, "6 processes do not split"),
    (3, {EP: 2}, "3 processes do not split into expert_model_parallel_size=2"),
    (8, {EP: 8}, "--num-experts 4 does not split over --expert-model-parallel-size 8"),
    (2, {EP: 2, "num_moe_experts": None, "moe_layer_freq": 1}, "--num-experts None does not split"),
    (2, {TP: 2, "ffn_hidden_size": 47}, "--ffn-hidden-size 47 does not split over --tensor-model-parallel-size 2"),
    (
        2,
        {CP: 2, "experimental_attention_variant": None, "cp_comm_type": "p2p"},
        "--context-parallel-size 2 gathers keys, but --cp-comm-type is p2p",
    ),
]


@pytest.mark.parametrize(("world", "options", "piece"), UNPARALLEL, ids=[piece[:40] for _, _, piece in UNPARALLEL])
def test_what_does_not_split_over_the_processes_is_refused(world: int, options: dict[str, object], piece: str) -> None:
    model = dataclasses.replace(CONFIG, **{"cp_comm_type": "allgather", **options})
    with pytest.raises(ValueError, match=r"^.*\.$") as refusal:
        require_parallel(model, world)
    assert piece in str(refusal.value)


def test_dense_attention_splits_too() -> None:
    model = dataclasses.replace(CONFIG, experimental_attention_variant=None, cp_comm_type="allgather")
    for axis in (TP, CP):
        assert require_parallel(dataclasses.replace(model, **{axis: 2}), 2).data == 1


def test_the_rest_of_the_processes_is_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "29500")
    config, _ = complete(parsed("--tensor-model-parallel-size", "2"))
    assert config.training.global_batch_size == 4
    # Samples that do not split into zigzag chunks are padded (data/shard.py).
    complete(parsed("--context-parallel-size", "2", "--cp-comm-type", "allgather", "--seq-length", "15"))
    with pytest.raises(ValueError, match="6 is no multiple of --micro-batch-size 2 times 2 data-parallel ranks"):
        complete(parsed("--tensor-model-parallel-size", "2", "--global-batch-size", "6"))
    with pytest.raises(ValueError, match="vocabulary of 257 entries .padded. does not split over"):
        complete(parsed("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "1"))
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="WORLD_SIZE is 4, but RANK"):
        complete(parsed())


def test_a_model_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The model has 74\d billion parameters, .* GiB: choose a smaller model\."):
        require_memory(dataclasses.replace(get_preset("glm-5"), bf16=True), torch.device("cpu"))
    require_memory(CONFIG, torch.device("cpu"))
    with pytest.raises(ValueError, match=r" GiB a process, .* GiB for each: .*, or start more processes\."):
        require_memory(get_preset("glm-5"), torch.device("cpu"), ParallelSizes(8, tensor=2, expert=4))


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(parsed()) == device_of(parsed("--device", "cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="PyTorch finds no GPU"):
        device_of(parsed("--device", "cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank, piece in (("4", "LOCAL_RANK is 4, but PyTorch finds 4 GPUs"), ("x", "LOCAL_RANK is 'x' in the env")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match=piece):
            device_of(parsed())
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of(parsed()) == torch.device("cuda", 3)
    assert device_of(parsed("--device", "cpu")) == torch.device("cpu")


def test_kernels_are_asked_about_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cpu`` on a machine with a GPU: the GPU's answer would let it die inside a kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shape = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "dsa_indexer_head_dim": 128}
    model = dataclasses.replace(CONFIG, dsa_kernel_backend="cudnn", dsa_indexer_scoring_precision="bf16", **shape)
    with pytest.raises(ValueError, match="^dsa_kernel_backend='cudnn' runs on CUDA devices .* built on cpu: run on a "):
        require_kernels(model, torch.device("cpu"))
    require_kernels(CONFIG, torch.device("cpu"))
