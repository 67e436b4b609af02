"""Checks across configuration classes, and the values that follow from others; all before anything is created.

``complete`` returns a configuration in which every derived value stands: batch sizes, vocabulary, longest position.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.parallel_state import ParallelSizes
from megatron.core.transformer.experimental_attention_variant.dsa.backends import resolve
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import PretrainConfig
from megatron.training.config import OptimizerConfig, TrainingConfig
from megatron.training.launcher import read_launch
from megatron.training.metrics import wandb_is_installed
from megatron.training.scheduler import warmup_iters
from megatron.training.tokenizer import Tokenizer, build_tokenizer


def require_parallel(model: MLATransformerConfig, world_size: int) -> ParallelSizes:
    """Check that the model splits over the processes that were started.

    Raises:
        ValueError: sizes that do not divide the processes or the model, or what has no parallel form.
    """
    sizes = ParallelSizes.of(model, world_size)
    if sizes.context > 1 and model.cp_comm_type != "allgather":  # with DSA, DSAConfig has said so
        raise ValueError(
            f"--context-parallel-size {sizes.context} gathers keys, but --cp-comm-type is {model.cp_comm_type}: set "
            "it to allgather."
        )
    widths = {
        "--num-attention-heads": model.num_attention_heads,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size,
    }
    for flag, width in widths.items():
        if width is not None and width % sizes.tensor:
            raise ValueError(
                f"{flag} {width} does not split over --tensor-model-parallel-size {sizes.tensor}: make it a multiple."
            )
    if sizes.expert > 1 and (model.num_moe_experts is None or model.num_moe_experts % sizes.expert):
        raise ValueError(
            f"--num-experts {model.num_moe_experts} does not split over --expert-model-parallel-size {sizes.expert}: "
            "make it a multiple."
        )
    return sizes


def complete(config: PretrainConfig) -> tuple[PretrainConfig, Tokenizer]:
    """The configuration with derived values filled in, and its tokenizer.

    Raises:
        ValueError: one sentence about what is missing or contradicts itself.
    """
    sizes = require_parallel(config.model, read_launch().world_size)
    _require_given(config)
    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, config.model.vocab_size)
    training = _with_batch_sizes(config.training, sizes.data)
    model = _with_vocabulary(config.model, tokenizer, config)
    _check_vocabulary_splits(model, sizes)
    model = _with_positions(model, config)
    _check_schedule(config.optimizer, training)
    _check_places(config)
    return dataclasses.replace(config, training=training, model=model), tokenizer


def device_of(config: PretrainConfig) -> torch.device:
    """Where to run.

    Raises:
        ValueError: a GPU was asked for and there is none, or none for this process.
    """
    wanted = config.distributed.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda was given, but PyTorch finds no GPU: use --device cpu, or a CUDA build of PyTorch."
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = read_launch().local_rank, torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"LOCAL_RANK is {index}, but PyTorch finds {count} GPUs on this machine: start at most {count} processes "
            "on it, or use --device cpu."
        )
    return torch.device("cuda", index)


def require_kernels(model: MLATransformerConfig, device: torch.device) -> None:
    """Ask the DSA backend about the device of this run, which need not be the one that PyTorch would choose.

    Raises:
        ValueError: it cannot run this configuration there.
    """
    if model.experimental_attention_variant == "dsa":
        dsa = model.dsa_config()
        if reason := resolve(dsa.kernel_backend).unsupported(dsa, device):
            raise ValueError(reason)


def require_memory(model: MLATransformerConfig, device: torch.device, sizes: ParallelSizes | None = None) -> None:
    """Refuse a model whose training state alone does not fit, before anything is allocated.

    Raises:
        ValueError: FP32 weights, gradients and two moments (and BF16 copies) take more than the device has. Over
            several processes each holds its share, and those of one machine share its memory.
    """
    whole = dataclasses.replace(
        model,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )
    parameters = sum(parameter.numel() for parameter in build_gpt_model(whole, device="meta").parameters())
    ranks = 1 if sizes is None else sizes.world
    needed = parameters * (20 if model.bf16 and ranks == 1 else 16) // ranks
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available //= read_launch().local_world_size
    if needed > available:
        raise ValueError(
            f"The model has {parameters / 1e9:.3g} billion parameters, whose weights, gradients and optimizer state "
            f"take {needed / 2**30:.0f} GiB{'' if ranks == 1 else ' a process'}, but this machine's {device.type} has "
            f"{available / 2**30:.0f} GiB{'' if ranks == 1 else ' for each'}: choose a smaller model"
            f"{'' if ranks == 1 else ', or start more processes'}."
        )


def _require_given(config: PretrainConfig) -> None:
    needed = {
        "--micro-batch-size": config.training.micro_batch_size,
        "--train-iters": config.training.train_iters,
        "--lr": config.optimizer.lr,
        "--seq-length": config.data.seq_length,
    }
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ValueError(
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing: a run needs each of them."
        )


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _with_batch_sizes(training: TrainingConfig, data_parallel: int) -> TrainingConfig:
    micro, total = training.micro_batch_size, training.global_batch_size
    assert micro is not None
    if total is not None and total % (micro * data_parallel):
        ranks = "" if data_parallel == 1 else f" times {data_parallel} data-parallel ranks"
        raise ValueError(
            f"--global-batch-size {total} is no multiple of --micro-batch-size {micro}{ranks}: change one of them."
        )
    return dataclasses.replace(training, global_batch_size=total or micro * data_parallel)


def _with_vocabulary(model: MLATransformerConfig, tokenizer: Tokenizer, config: PretrainConfig) -> MLATransformerConfig:
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"--vocab-size {model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{config.data.tokenizer_type}: raise it, or name the tokenizer that it was meant for."
        )
    return model


def _check_vocabulary_splits(model: MLATransformerConfig, sizes: ParallelSizes) -> None:
    if model.padded_vocab_size % sizes.tensor:
        raise ValueError(
            f"The vocabulary of {model.padded_vocab_size} entries (padded) does not split over "
            f"--tensor-model-parallel-size {sizes.tensor}: make --make-vocab-size-divisible-by a multiple of it."
        )


def _with_positions(model: MLATransformerConfig, config: PretrainConfig) -> MLATransformerConfig:
    length, longest = config.data.seq_length, model.max_position_embeddings
    assert length is not None
    if longest is not None and length > longest:
        raise ValueError(
            f"--seq-length {length} exceeds --max-position-embeddings {longest}: shorten the samples or raise the "
            "limit."
        )
    return dataclasses.replace(model, max_position_embeddings=longest or length)


def _check_schedule(optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    assert training.train_iters is not None
    decay = optimizer.lr_decay_iters or training.train_iters
    warmup = warmup_iters(optimizer, decay)
    if warmup >= decay:
        raise ValueError(
            f"Warm-up takes {warmup} steps, but the schedule ends after {decay}: shorten --lr-warmup-iters, or raise "
            "--lr-decay-iters or --train-iters."
        )


def _check_places(config: PretrainConfig) -> None:
    if config.logging.wandb_project is not None and not wandb_is_installed():
        raise ValueError(
            f"--wandb-project {config.logging.wandb_project} needs the wandb package, which is not installed: "
            "pip install wandb, or drop the flag."
        )
    if config.checkpoint.load is not None and not Path(config.checkpoint.load).is_dir():
        if config.checkpoint.load != config.checkpoint.save:
            raise ValueError(f"--load {config.checkpoint.load} is no directory: check the path.")
