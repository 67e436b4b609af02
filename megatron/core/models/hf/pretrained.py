"""Whole checkpoints: a Hugging Face folder -> GPTModel, and back.

Import checks everything before it writes anything: config.json, the names and shapes of all tensors, FP8 scales. Then
tensors stream one at a time into the built model, so peak memory is the model and one tensor. Export streams the other
way. A model that is sharded over ranks takes its own parts, each rank reading for itself; it is exported by way of a
checkpoint, which one process reads whole (``convert_hf export``).
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hf.block_fp8 import block_shape
from megatron.core.models.hf.config_export import config_to_hf, portability_notes
from megatron.core.models.hf.config_import import config_from_hf
from megatron.core.models.hf.folder_writer import MAX_SHARD_BYTES, Entry, new_folder, write_json, write_tensors
from megatron.core.models.hf.sharded import copy_into
from megatron.core.models.hf.tensor_folder import TensorFolder, read_json
from megatron.core.models.hf.tensor_names import Slot, tensor_slots
from megatron.core.transformer.transformer_config import MLATransformerConfig

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
_FREE_KEYS = {"dtype", "initializer_range", "max_position_embeddings", "index_topk_freq", "index_skip_topk_offset"}
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    return read_json(Path(folder) / CONFIG_NAME)


def config_from_folder(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> MLATransformerConfig:
    """The model configuration of a checkpoint folder, for computing in ``dtype``; FP32 also scores in FP32.

    Raises:
        ValueError: as ``config_from_hf``, or another ``dtype`` than float32 and bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype} is not supported: load in torch.float32 or torch.bfloat16.")
    fields: dict[str, Any] = {"params_dtype": dtype}
    if dtype == torch.float32:
        fields["dsa_indexer_scoring_precision"] = "fp32"
    config = config_from_hf(read_config(folder), **fields | overrides)
    if "attention_latent_norm_epsilon" not in overrides:
        for note in portability_notes(config):
            logger.warning(note)
    return config


def check_same_model(config: MLATransformerConfig, hf: Mapping[str, Any]) -> None:
    """Check that a model computes what a config.json says, apart from rounding: both must export alike.

    Raises:
        ValueError: one of them cannot be expressed, or they differ (all fields listed).
    """
    expected = config_from_hf(
        hf,
        dsa_indexer_topk_freq=config.dsa_indexer_topk_freq,
        dsa_indexer_skip_topk_offset=config.dsa_indexer_skip_topk_offset,
    )
    ours, theirs = config_to_hf(config), config_to_hf(expected)
    names = sorted((ours.keys() | theirs.keys()) - _FREE_KEYS)
    different = [
        f"{name} ({ours.get(name)!r}, checkpoint {theirs.get(name)!r})"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        raise ValueError(
            f"The model computes something else than the checkpoint's config.json says in {', '.join(different)}: set "
            "the model's options as the checkpoint has them."
        )


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    skip_mtp: bool = False,
    progress: bool = False,
    **overrides: Any,
) -> GPTModel:
    """Build the model of a Hugging Face checkpoint folder and load its weights.

    Args:
        folder: holds config.json and safetensors files of a glm_moe_dsa or deepseek_v32 model.
        dtype: data type of the parameters; FP32 also scores the indexer in FP32.
        skip_mtp: leave out multi-token-prediction layers, which this package does not have.
        progress: show a progress bar.
        **overrides: fields of MLATransformerConfig that replace what config.json says.

    Raises:
        ValueError: config.json cannot be expressed, or the tensors do not fit it (all of them named).
    """
    folder = Path(folder)
    # Built without memory first: weights that the checkpoint replaces are not drawn, and bad folders fail at once.
    model = build_gpt_model(config_from_folder(folder, dtype=dtype, **overrides), device="meta")
    materialize(model)
    _load(model, folder, skip_mtp=skip_mtp, progress=progress)
    return model


def materialize(model: GPTModel) -> GPTModel:
    """Give a model that was built on the meta device memory: weights to be loaded, and buffers at zero.

    Counters are in no checkpoint and start at zero.
    """
    model.to_empty(device=torch.get_default_device())
    for buffer in model.buffers():
        buffer.zero_()
    return model


def load_hf_weights(model: nn.Module, folder: str | Path, *, skip_mtp: bool = False, progress: bool = False) -> None:
    """Load the weights of a Hugging Face checkpoint folder into a model that was built otherwise.

    Raises:
        ValueError: the model's configuration computes something else than config.json says (every field named), or
            the tensors do not fit it.
    """
    check_same_model(_mla_config(model), read_config(folder))
    _load(model, Path(folder), skip_mtp=skip_mtp, progress=progress)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write a model as a Hugging Face checkpoint folder that transformers 5.24.0 loads; all of it or nothing.

    Args:
        folder: must not exist, or be empty.
        tokenizer_from: a checkpoint folder whose tokenizer files and special token ids are taken over.
        max_shard_bytes: size at which the tensors are cut into several files.
        progress: show a progress bar.

    Raises:
        ValueError: the configuration cannot be expressed, the folder is in use, or parameters are sharded.
    """
    config = _mla_config(model)
    hf = config_to_hf(config)
    for note in portability_notes(config):
        logger.warning(note)
    if tokenizer_from is not None:
        origin = read_config(tokenizer_from)
        hf |= {key: origin[key] for key in _TOKEN_ID_KEYS if key in origin}
    tensors = _whole_tensors(model)
    slots = {slot.hf: slot for slot in tensor_slots(config)}
    _check_all_covered(tensors, slots.values())
    entries = [_entry(slot, tensors, config) for slot in slots.values()]
    with new_folder(Path(folder)) as building, _bar(len(entries), "export", progress) as bar:

        def fetch(name: str) -> torch.Tensor:
            bar.update()
            return slots[name].part(tensors[slots[name].ours])

        write_tensors(building, entries, fetch, max_shard_bytes)
        write_json(building / CONFIG_NAME, hf)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), building)


def _load(model: nn.Module, folder: Path, *, skip_mtp: bool, progress: bool) -> None:
    hf = read_config(folder)
    config, tensors = _mla_config(model), model.state_dict()
    whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    slots = list(tensor_slots(config))
    _check_all_covered(tensors, slots)
    with TensorFolder(folder, block_shape(hf)) as files:
        shapes = files.shapes
        mtp = _mtp_tensors(shapes, config.num_layers, hf)
        if mtp:
            _report_mtp(folder, mtp, skip_mtp)
        _check_tensors(folder, {name: shape for name, shape in shapes.items() if name not in mtp}, slots, whole)
        slots.sort(key=lambda slot: files.file_of(slot.hf))
        with _bar(len(slots), "import", progress) as bar:
            for slot in slots:
                copy_into(slot, tensors[slot.ours], partial(files.read, slot.hf))
                bar.update()


def _mla_config(model: nn.Module) -> MLATransformerConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, MLATransformerConfig):
        raise ValueError(
            f"The model's configuration is a {type(config).__name__}, but Hugging Face's DSA models use multi-latent "
            "attention: build it from an MLATransformerConfig."
        )
    return config


def _bar(total: int, what: str, progress: bool) -> tqdm[Any]:
    return tqdm(total=total, desc=what, unit=" tensors", disable=not progress)


def _whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> tensor sharing memory with the model."""
    tensors: dict[str, torch.Tensor] = model.state_dict()
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise ValueError(
            f"{len(sharded)} parameters are sharded over ranks ({sharded[0]}, ...), but a folder is written by one "
            "process: save a checkpoint, and export that by python -m megatron.tools.convert_hf export."
        )
    return tensors


def _check_all_covered(tensors: Mapping[str, torch.Tensor], slots: Iterable[Slot]) -> None:
    extra = sorted(tensors.keys() - {slot.ours for slot in slots})
    if extra:
        raise ValueError(
            f"The model has {len(extra)} tensors without a Hugging Face counterpart, so its options cannot be "
            f"expressed there: build it without them. They are: {', '.join(extra)}"
        )


def _mtp_tensors(shapes: Mapping[str, object], num_layers: int, hf: Mapping[str, Any]) -> set[str]:
    """Tensors of multi-token-prediction layers, which follow the last decoder layer."""
    layers: dict[int, list[str]] = {}
    for name in shapes:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found and int(found[1]) >= num_layers:
            layers.setdefault(int(found[1]), []).append(name)
    told = num_layers + int(hf.get("num_nextn_predict_layers") or 0)
    return {
        name
        for layer, names in layers.items()
        if layer < told or any(name.endswith(".eh_proj.weight") for name in names)
        for name in names
    }


def _report_mtp(folder: Path, mtp: set[str], skip_mtp: bool) -> None:
    layers = sorted({int(name.split(".")[2]) for name in mtp})
    if not skip_mtp:
        raise ValueError(
            f"{folder} holds {len(mtp)} tensors of multi-token-prediction layers {layers}, which this package does not "
            "have: pass skip_mtp=True (--skip-mtp) to leave them out."
        )
    logger.warning("Skipped %d tensors of multi-token-prediction layers %s of %s.", len(mtp), layers, folder)


def _check_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], slots: Iterable[Slot], tensors: Mapping[str, torch.Tensor]
) -> None:
    needed = {slot.hf: tuple(slot.part(tensors[slot.ours]).shape) for slot in slots}
    wrong = {
        "missing": needed.keys() - shapes.keys(),
        "unexpected": shapes.keys() - needed.keys(),
        "of another shape": {
            f"{name} {shapes[name]} instead of {needed[name]}"
            for name in needed.keys() & shapes.keys()
            if shapes[name] != needed[name]
        },
    }
    if any(wrong.values()):
        found = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in wrong.items() if names)
        raise ValueError(
            f"The tensors in {folder} do not fit its config.json: use weights and config.json of one model. {found}"
        )


def _listed(names: Iterable[str]) -> str:
    """Names in the order of their layer numbers."""
    return ", ".join(
        sorted(names, key=lambda name: [part.zfill(8) if part.isdigit() else part for part in name.split(".")])
    )


def _entry(slot: Slot, tensors: Mapping[str, torch.Tensor], config: MLATransformerConfig) -> Entry:
    dtype = torch.float32 if config.computes_in_fp32(slot.ours) else config.params_dtype
    return Entry(slot.hf, dtype, tuple(slot.part(tensors[slot.ours]).shape))


def _copy_tokenizer(origin: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
