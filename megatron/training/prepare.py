"""From a complete configuration to a run that can start: data opened, model built, checkpoint loaded.

Everything that can be wrong with what the user gave is found here, and nothing is created on disk.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.hf import load_hf_weights, portability_notes
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, Layout
from megatron.core.transformer.experimental_attention_variant.dsa.context_parallel import pairs_by_rank
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import PretrainConfig
from megatron.training.checkpointing import (
    Checkpoint,
    Progress,
    find_checkpoint,
    later_steps,
    load_checkpoint,
    saved_options,
)
from megatron.training.compute_params import ComputeParams, as_fp32
from megatron.training.data.build import Datasets, build_datasets
from megatron.training.data.shard import pad_offsets
from megatron.training.optimizer import build_optimizer
from megatron.training.ranks import rank, world_size
from megatron.training.sharding import ShardedCompute, materialize, shard_model
from megatron.training.step import Engine
from megatron.training.tokenizer import Tokenizer
from megatron.training.validate import require_kernels, require_memory

# Groups of options that decide what is learned; the others may differ from start to start.
_COMPARED_GROUPS = ("model", "data", "optimizer", "training")
_FREE = {
    "exit_interval",
    "exit_duration_in_mins",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "cp_comm_type",
}
# The first is set where nothing is. These workspaces are those that PyTorch accepts.
_REPEATING_WORKSPACES = (":4096:8", ":16:8")
# On equal topologies a ring and a tree add up in one order. NVLS and CollNet add up in switches, in no order that NCCL
# promises, and NCCL may choose them for some sizes where it is free to.
_REPEATING_ALGORITHMS = ("Ring", "Tree", "Ring,Tree", "Tree,Ring")


@dataclass
class Prepared:
    """A run that can start: nothing but its lock is on disk yet, and nothing more can be wrong with its input."""

    config: PretrainConfig
    engine: Engine
    datasets: Datasets
    progress: Progress
    checkpoint: Checkpoint | None
    notices: list[str]


def prepare(config: PretrainConfig, tokenizer: Tokenizer, device: torch.device) -> Prepared:
    """Open the data, build the model and load the checkpoint.

    Raises:
        ValueError: one sentence about what is wrong.
    """
    if config.model.deterministic_mode:
        make_deterministic(device, world_size())
    checkpoint = None if config.checkpoint.load is None else find_checkpoint(config.checkpoint)
    progress = _progress_from(checkpoint, config)
    datasets = build_datasets(config.data, _dataset_sizes(config, progress), tokenizer)
    if datasets[0] is None and not config.training.skip_train:
        raise ValueError("The training set is empty: give it a share of --split, or name --train-data-path.")
    sizes = ParallelSizes.of(config.model, world_size())
    require_kernels(config.model, device)
    require_memory(config.model, device, sizes)
    torch.manual_seed(config.data.seed)
    groups = build_process_groups(sizes, device.type)
    model, compute = build_model(config.model, groups, device)
    engine = Engine(
        model,
        compute,
        build_optimizer(model, config.optimizer),
        device,
        config.optimizer,
        config.model.calculate_per_token_loss,
        config.training.check_for_nan_in_loss_and_grad,
        groups,
    )
    notices = [*_load(config, engine, checkpoint), *_setup_notices(config, model, datasets, sizes)]
    if not config.training.skip_train:
        notices += later_steps(config.checkpoint, progress.step)
    return Prepared(config, engine, datasets, progress, checkpoint, notices)


def _setup_notices(
    config: PretrainConfig, model: torch.nn.Module, datasets: Datasets, sizes: ParallelSizes
) -> list[str]:
    notices = []
    if datasets[1] is None and config.validation.eval_iters > 0:
        notices.append("There is no validation set, so nothing is evaluated while training.")
    if config.model.experimental_attention_variant == "dsa":
        notices.append(backend_in_effect(model))
        if sizes.tensor > 1:
            assert config.data.seq_length is not None
            notices.append(indexer_imbalance(config.data.seq_length, sizes))
    return notices


def make_deterministic(device: torch.device, ranks: int) -> None:
    """Have PyTorch repeat its sums, and the libraries that read the environment when they are first used.

    Raises:
        ValueError: a variable is set to what does not repeat.
    """
    if device.type == "cuda":
        _require_variable("CUBLAS_WORKSPACE_CONFIG", _REPEATING_WORKSPACES, "cuBLAS multiplies")
        if ranks > 1:
            _require_variable("NCCL_ALGO", _REPEATING_ALGORITHMS, "NCCL adds up")
    torch.use_deterministic_algorithms(True)


def _require_variable(name: str, accepted: tuple[str, ...], what: str) -> None:
    value = os.environ.setdefault(name, accepted[0])
    if value.lower() not in {choice.lower() for choice in accepted}:
        raise ValueError(
            f"deterministic_mode=True needs {name} to be {' or '.join(accepted)}, but the environment has {value!r}, "
            f"with which {what} in an order that may differ from run to run: unset {name}, or set one of these."
        )


def build_model(
    config: MLATransformerConfig, groups: ProcessGroupCollection, device: torch.device
) -> tuple[torch.nn.Module, ComputeParams | ShardedCompute]:
    """The model with FP32 parameters and initial weights, whole in one process and sharded over several."""
    if groups.world is None:
        model = as_fp32(build_gpt_model(config, device=device))
        return model, ComputeParams(model, config.params_dtype, config.computes_in_fp32)
    sharded = build_gpt_model(config, device="meta", pg_collection=groups)
    as_fp32(sharded)
    compute = shard_model(sharded, groups)
    materialize(sharded, device)
    return sharded, compute


def backend_in_effect(model: torch.nn.Module) -> str:
    """What the model's DSA layers were built to run on; nothing falls back to another backend later."""
    layers = [module for module in model.modules() if isinstance(module, DSAttention)]
    dsa, selecting = layers[0].dsa, sum(layer.indexer is not None for layer in layers)
    backend = "reference" if dsa.kernel_backend == "none" else dsa.kernel_backend
    loss = "off" if not dsa.loss_enabled else "sparse" if dsa.use_sparse_loss else "dense"
    return (
        f"DSA runs on the {backend} backend (scoring {dsa.scoring_precision}, loss {loss}): layers that select keys "
        f"{selecting}, layers that reuse them {len(layers) - selecting}."
    )


def indexer_imbalance(seq_length: int, sizes: ParallelSizes) -> str:
    """How unevenly tensor-parallel ranks, which hold contiguous slices of rows, share out the indexer's scores."""
    offsets, padded = pad_offsets((0, seq_length), sizes.context, sizes.tensor)
    layouts = (Layout.zigzag(offsets, sizes.context, rank, padded) for rank in range(sizes.context))
    pairs = [count for layout in layouts for count in pairs_by_rank(layout, sizes.tensor)]
    busiest = max(pairs) / (sum(pairs) / len(pairs))
    # A slice of nothing but padding has no pairs.
    against = f"{max(pairs) / min(pairs):.1f} times the pairs of the idlest and " if min(pairs) else ""
    return (
        f"The indexer's rows are shared out over {sizes.tensor} tensor-parallel ranks in contiguous slices: in one "
        f"causal document of {seq_length} tokens the busiest rank scores {against}{busiest:.2f} times the mean."
    )


def config_record(config: PretrainConfig) -> dict[str, Any]:
    """All options as JSON can hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    record = plain(dataclasses.asdict(config))
    assert isinstance(record, dict)
    return record


def _progress_from(checkpoint: Checkpoint | None, config: PretrainConfig) -> Progress:
    if checkpoint is None or config.checkpoint.finetune:
        return Progress()
    progress, last = dataclasses.replace(checkpoint.progress), config.training.train_iters
    assert last is not None
    if progress.step > last and not config.training.skip_train:
        raise ValueError(
            f"Checkpoint {checkpoint.path} is of step {progress.step}, but --train-iters {last} ends before it: raise "
            "--train-iters, which counts from the first start, or give --finetune or an earlier --ckpt-step."
        )
    return progress


def _dataset_sizes(config: PretrainConfig, progress: Progress) -> tuple[int, int, int]:
    """Samples of each set. What is consumed counts as it was read: earlier steps may have had another batch size."""
    training = config.training
    assert training.train_iters is not None and training.global_batch_size is not None
    evaluation = config.validation.eval_iters * training.global_batch_size
    steps_left = max(training.train_iters - progress.step, 0)
    return progress.consumed_samples + steps_left * training.global_batch_size, evaluation, evaluation


def _load(config: PretrainConfig, engine: Engine, checkpoint: Checkpoint | None) -> list[str]:
    """Fill the engine from ``checkpoint``, or with initial weights; returns what is to be said about it."""
    options = config.checkpoint
    if checkpoint is None:
        return _initial_weights(config, engine)
    fresh = load_checkpoint(checkpoint, engine.model, engine.optimizer, options)
    if options.finetune:
        return [f"Weights come from {checkpoint.path}; everything else starts afresh."]
    notices = [f"Resumed from {checkpoint.path} after step {checkpoint.progress.step}."]
    changed = changed_options(saved_options(checkpoint), config_record(config))
    if changed:
        notices.append(f"Options differ from those of the checkpoint: {', '.join(changed)}.")
    if fresh:
        notices.append(f"Optimizer state starts fresh for {len(fresh)} parameters that had none ({fresh[0]}, ...).")
    return notices


def changed_options(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What differs among the options that decide what is learned, as "name old -> new"."""
    changes = []
    for group in _COMPARED_GROUPS:
        before, now = saved.get(group, {}), present[group]
        names = [name for name in now if name in before and name not in _FREE and before[name] != now[name]]
        changes += [f"{name} {before[name]} -> {now[name]}" for name in names]
    return changes


def _initial_weights(config: PretrainConfig, engine: Engine) -> list[str]:
    """Fill a model that no checkpoint fills, and say with what."""
    options = config.checkpoint
    empty = [] if options.load is None else [f"{options.load} holds no checkpoint yet: training starts from scratch."]
    if options.load_hf is None:
        return empty
    load_hf_weights(engine.model, options.load_hf, skip_mtp=options.skip_mtp, progress=rank() == 0)
    return [f"Weights come from {options.load_hf}.", *portability_notes(config.model)]
