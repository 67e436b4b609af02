"""Convert between Hugging Face checkpoints and this package's: `python -m megatron.tools.convert_hf import|export`.

    import --hf FOLDER --save DIR     a checkpoint of step 0 with weights alone, for `pretrain_gpt --load DIR`
    export --load DIR --hf FOLDER     a folder that transformers, vLLM and SGLang load

A checkpoint holds FP32 weights and, in its config.json, the options of its model; the data type that those name is the
one that an export writes. Both directions write their result under its name when it is whole. Wrong flags and input
that cannot be used end with one sentence and exit code 2, before anything is created.

Left out: sharded conversion. The model must fit into this machine's memory in FP32.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.hf import config_to_hf, from_pretrained, materialize, read_config, save_pretrained
from megatron.core.models.hf.folder_writer import require_free
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.checkpointing import (
    LATEST,
    Progress,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    saved_steps,
)
from megatron.training.compute_params import as_fp32
from megatron.training.config import CheckpointConfig
from megatron.training.path_arguments import OneLineParser, path_text, require_writable
from megatron.training.run_lock import held

PROGRAM = "convert_hf"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# How a run computes says nothing about its weights: here they pass through one process, on any machine.
_ANYWHERE = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "dsa_kernel_backend": "none",
    "dsa_indexer_scoring_precision": "bf16",
    "dsa_match_engine": None,
    "deterministic_mode": False,
}


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog=PROGRAM, description="Convert checkpoints from and to Hugging Face.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser, metavar="import|export")
    what = "Hugging Face folder -> checkpoint"
    importing = commands.add_parser("import", help=what, description=what, allow_abbrev=False)
    importing.add_argument(
        "--hf",
        type=path_text,
        required=True,
        metavar="FOLDER",
        help="folder that holds config.json and safetensors files",
    )
    importing.add_argument(
        "--save", type=path_text, required=True, metavar="DIR", help="directory of the checkpoint to write"
    )
    importing.add_argument(
        "--dsa-indexer-topk-freq",
        nargs="+",
        type=int,
        metavar="N",
        help="which layers select keys (1) or reuse them (0), one entry a layer; for irregular indexer_types",
    )
    importing.add_argument("--skip-mtp", action="store_true", help="leave out multi-token-prediction layers")
    what = "checkpoint -> Hugging Face folder"
    exporting = commands.add_parser("export", help=what, description=what, allow_abbrev=False)
    exporting.add_argument(
        "--load", type=path_text, required=True, metavar="DIR", help="directory of checkpoints; the latest is exported"
    )
    exporting.add_argument(
        "--hf", type=path_text, required=True, metavar="FOLDER", help="folder to write; it must not exist, or be empty"
    )
    exporting.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint to export instead")
    exporting.add_argument("--dtype", choices=_DTYPES, help="data type to write instead of the model's own")
    exporting.add_argument(
        "--tokenizer-from",
        type=path_text,
        metavar="FOLDER",
        help="Hugging Face folder whose tokenizer files and token ids are taken over",
    )
    return parser


def import_checkpoint(folder: Path, save: Path, skip_mtp: bool = False, schedule: list[int] | None = None) -> Path:
    """Write a Hugging Face checkpoint's weights as step 0 of ``save``; returns the checkpoint's directory.

    Args:
        schedule: an explicit ``dsa_indexer_topk_freq`` list, for checkpoints with an irregular one.

    Raises:
        ValueError: ``save`` holds a checkpoint already or cannot be written to, or the folder cannot be read.
        BlockingIOError: a run uses ``save``.
    """
    require_writable("--save", save)
    with held({"--save": save}) as notices:
        for notice in notices:
            print(f"{PROGRAM}: {notice}", file=sys.stderr)
        if (save / LATEST).exists() or saved_steps(save):
            raise ValueError(f"--save {save} holds a checkpoint already: give another directory.")
        return _import_into(save, folder, skip_mtp, schedule)


def _import_into(save: Path, folder: Path, skip_mtp: bool, schedule: list[int] | None) -> Path:
    hf = read_config(folder)
    overrides: dict[str, Any] = {"dsa_indexer_scoring_precision": "bf16"}
    if schedule is not None:
        overrides["dsa_indexer_topk_freq"] = schedule
    model = from_pretrained(folder, skip_mtp=skip_mtp, progress=True, **overrides)
    assert isinstance(model.config, MLATransformerConfig)
    config = _in_dtype(model.config, str(hf.get("dtype") or hf.get("torch_dtype")))
    options = CheckpointConfig(save=str(save), save_optim=False, save_rng=False)
    return save_checkpoint(save, Progress(), model, _no_optimizer(), options, {"model": _record(config)})


def export_checkpoint(
    load: Path, folder: Path, step: int | None = None, dtype: str | None = None, tokenizer_from: str | None = None
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Raises:
        ValueError: there is no such checkpoint, its model cannot be expressed, ``folder`` is in use or cannot be
            made, or ``tokenizer_from`` is no Hugging Face folder.
    """
    require_free(folder)
    require_writable("--hf", folder)
    if tokenizer_from is not None:
        read_config(tokenizer_from)
    options = CheckpointConfig(load=str(load), ckpt_step=step, exit_on_missing_checkpoint=True, finetune=True)
    checkpoint = find_checkpoint(options)
    assert checkpoint is not None
    config = _recorded_config(checkpoint.path / "config.json")
    config = config if dtype is None else _in_dtype(config, dtype)
    config_to_hf(config)  # before the weights are read, for its refusals
    model = as_fp32(materialize(build_gpt_model(config, device="meta")))
    load_checkpoint(checkpoint, model, _no_optimizer(), options)
    save_pretrained(model, folder, tokenizer_from=tokenizer_from, progress=True)


def _no_optimizer() -> torch.optim.Optimizer:
    """Fills the place of the optimizer, whose state is neither saved nor loaded here."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))])


def _in_dtype(config: MLATransformerConfig, name: str) -> MLATransformerConfig:
    """The configuration of the same model computing in a data type; FP32 for names without meaning here."""
    dtype = _DTYPES.get(name, torch.float32)
    return dataclasses.replace(config, params_dtype=dtype, bf16=dtype == torch.bfloat16)


def _record(config: MLATransformerConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in fields.items()}


def _recorded_config(path: Path) -> MLATransformerConfig:
    """The model's options in a checkpoint's config.json, whatever machine and processes the run was made for."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))["model"]
        known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
        fields = {name: value for name, value in recorded.items() if name in known} | _ANYWHERE
        fields["params_dtype"] = getattr(torch, str(fields["params_dtype"]).removeprefix("torch."))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_options(path, error) from None
    try:
        return MLATransformerConfig(**fields)
    except TypeError as error:  # a value of another type; what the configuration itself refuses is a ValueError
        raise _no_options(path, error) from None


def _no_options(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} does not hold the options of a model ({error!r}): export another checkpoint.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "import":
            path = import_checkpoint(Path(args.hf), Path(args.save), args.skip_mtp, args.dsa_indexer_topk_freq)
            print(f"Wrote {path}; train it with: pretrain_gpt --load-hf {args.hf} --load {args.save}")
        else:
            export_checkpoint(Path(args.load), Path(args.hf), args.ckpt_step, args.dtype, args.tokenizer_from)
            print(f"Wrote {args.hf}")
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
