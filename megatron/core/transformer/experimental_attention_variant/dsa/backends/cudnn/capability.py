"""What the kernels accept on this machine, asked once, when a module is built.

Versions, architectures and shape limits live here and in ``frontend.py`` alone. Each refusal is one sentence: option,
value, limit, remedy. The question can be asked on a CPU machine too: packages are looked up by their metadata, and
only on a GPU that could run it is FlashMLA imported.

FlashMLA's releases differ in what its version does not tell: which architectures it was compiled for, whether rows have
lengths, in which base it returns the log-sum-exp. So one row of one key goes through it, once in a process.

Measured on SM 9.0 alone. Blackwell has kernels of its own behind the same names, which nobody has run through this
wiring, so it is refused by name instead of being tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from ...config import DSAConfig
from . import frontend

FRONTEND_PACKAGE = "nvidia-cudnn-frontend"
# Measured with 1.32. Its namespaces may change in the next major release, so that one is not taken on trust.
FRONTEND_MINIMUM = (1, 32)
FRONTEND_LIMIT = (2, 0)
FLASH_MLA_COMMAND = "pip install 'sgl-flash-mla>=1.0'"
INDEXER_HEAD_DIM = 128
MAX_INDEXER_HEADS = 64
FP8_INDEXER_HEADS = (32, 64)
LATENT_WIDTH = 512
ROPE_WIDTHS = (0, 64)
MAX_TOPK = 2048
# A base-2 log-sum-exp of a logit of 1 would be 1.44.
TRIAL_TOLERANCE = 1e-2


def unsupported(config: DSAConfig, device: torch.device) -> str | None:
    """The first reason why ``config`` cannot run on ``device``, or None."""
    reason = _determinism_reason(config) or _shape_reason(config) or _device_reason(device) or _frontend_reason()
    return reason or _flash_mla_reason(config, device) or _triton_reason(config)


def _determinism_reason(config: DSAConfig) -> str | None:
    if not config.deterministic_mode:
        return None
    with_loss, kernels = "", "sparse_attention_backward (dkv) kernel adds"
    if config.loss_enabled:
        with_loss = f" with dsa_indexer_loss_coeff={config.loss_coeff}"
        kernels = "indexer_backward (dk) and sparse_attention_backward (dkv) kernels add"
    return (
        f"deterministic_mode=True cannot train{with_loss} on dsa_kernel_backend='cudnn': its {kernels} up in another "
        "order in every run on SM 9.0; set dsa_kernel_backend='none', or deterministic_mode=False."
    )


def _shape_reason(config: DSAConfig) -> str | None:
    limits = (
        (config.head_dim == INDEXER_HEAD_DIM, "dsa_indexer_head_dim", config.head_dim, f"{INDEXER_HEAD_DIM}"),
        (config.n_heads <= MAX_INDEXER_HEADS, "dsa_indexer_n_heads", config.n_heads, f"at most {MAX_INDEXER_HEADS}"),
        (config.topk <= MAX_TOPK, "dsa_indexer_topk", config.topk, f"at most {MAX_TOPK}"),
        (config.kv_lora_rank == LATENT_WIDTH, "kv_lora_rank", config.kv_lora_rank, f"{LATENT_WIDTH}"),
        (
            config.qk_pos_emb_head_dim in ROPE_WIDTHS,
            "qk_pos_emb_head_dim",
            config.qk_pos_emb_head_dim,
            " or ".join(map(str, ROPE_WIDTHS)),
        ),
        (config.scoring_relu, "dsa_indexer_scoring_relu", config.scoring_relu, "True"),
    )
    for holds, option, value, limit in limits:
        if not holds:
            return (
                f"dsa_kernel_backend='cudnn' cannot run {option}={value!r}: its kernels take {limit}; change the "
                "option, or set dsa_kernel_backend='none'."
            )
    if config.scoring_precision == "fp8" and config.n_heads not in FP8_INDEXER_HEADS:
        return (
            f"dsa_indexer_scoring_precision='fp8' cannot run dsa_indexer_n_heads={config.n_heads}: its kernel takes "
            f"{' or '.join(map(str, FP8_INDEXER_HEADS))} heads; score in 'bf16'."
        )
    return None


def _device_reason(device: torch.device) -> str | None:
    remedy = "run on a Hopper GPU (H100, H200), or set dsa_kernel_backend='none'."
    if device.type != "cuda":
        return (
            f"dsa_kernel_backend='cudnn' runs on CUDA devices of SM 9.0, but the module is built on {device}: {remedy}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return None
    name = " (Blackwell, whose kernels have not been measured with this wiring yet)" if major >= 10 else ""
    return f"dsa_kernel_backend='cudnn' runs on SM 9.0, but {device} is SM {major}.{minor}{name}: {remedy}"


def _frontend_reason() -> str | None:
    installed = _installed_version(FRONTEND_PACKAGE)
    first, limit = ".".join(map(str, FRONTEND_MINIMUM)), FRONTEND_LIMIT[0]
    needs = f"dsa_kernel_backend='cudnn' needs {FRONTEND_PACKAGE} from {first} up to, but not including, {limit}"
    remedy = f"pip install '{FRONTEND_PACKAGE}[cutedsl]>={first},<{limit}'."
    if installed is None or find_spec("cutlass") is None:
        return f"{needs}, with its CuTe DSL, which is not installed: {remedy}"
    if not FRONTEND_MINIMUM <= _release(installed) < FRONTEND_LIMIT:
        return f"{needs}, but {installed} is installed: {remedy}"
    return None


def _flash_mla_reason(config: DSAConfig, device: torch.device) -> str | None:
    if find_spec("flash_mla") is None:
        return (
            "dsa_kernel_backend='cudnn' runs sparse attention on FlashMLA, which is not installed: "
            f"{FLASH_MLA_COMMAND}."
        )
    fault = _flash_mla_fault(config.kv_lora_rank + config.qk_pos_emb_head_dim, device)
    if fault is None:
        return None
    return (
        "dsa_kernel_backend='cudnn' runs on sgl-flash-mla 1.0 or newer, or on a FlashMLA from before 2026.09.30 whose "
        f"rows have lengths (topk_length) and whose kernels have SM 9.0, but the installed flash_mla {fault}: "
        f"{FLASH_MLA_COMMAND}."
    )


def _triton_reason(config: DSAConfig) -> str | None:
    fp8 = config.scoring_precision == "fp8"
    if (config.loss_enabled or fp8) and find_spec("triton") is None:
        needs = "scoring_precision='fp8'" if fp8 else f"loss_coeff={config.loss_coeff}"
        return (
            f"dsa_indexer_{needs} needs Triton with dsa_kernel_backend='cudnn', which is not installed: pip install "
            "triton."
        )
    return None


def _flash_mla_fault(width: int, device: torch.device) -> str | None:
    """What makes the installed ``flash_mla`` unfit, as the rest of a sentence, or None."""
    try:
        forward = frontend.flash_forward()
    except Exception as error:  # an extension built for another PyTorch raises whatever its loader raises
        return f"does not give flash_mla_sparse_fwd ({_first_line(error)})"
    if "topk_length" not in signature(forward).parameters:
        return "has a flash_mla_sparse_fwd without topk_length"
    return _trial_fault(getattr(forward, "func", forward), width, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
@torch.no_grad()
def _trial_fault(function: Callable[..., Any], width: int, device: torch.device) -> str | None:
    """What one row of one key with logit 1 and value 1 shows; ``function`` is the one that ``frontend`` calls."""
    q_RHD = torch.ones((1, 1, width), dtype=torch.bfloat16, device=device)
    ids = torch.full((1, frontend.TOPK_MULTIPLE), -1, dtype=torch.int32, device=device)
    ids[:, 0] = 0
    length = torch.ones(1, dtype=torch.int32, device=device)
    try:
        out, lse = frontend.sparse_forward(q_RHD, q_RHD[0], ids, length, 1.0 / width, LATENT_WIDTH)
        found = float(out.float().mean()), float(lse.mean())
    except torch.OutOfMemoryError:  # of this moment, so no answer to keep
        raise
    except Exception as error:
        return f"does not run on {device} ({_first_line(error)})"
    if not all(abs(value - 1.0) <= TRIAL_TOLERANCE for value in found):  # NaN is in no tolerance
        return f"gives output {found[0]:.4g} and log-sum-exp {found[1]:.4g} where both are 1"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    digits = ["".join(c for c in part if c.isdigit()) for part in text.split(".")[: len(FRONTEND_MINIMUM)]]
    return tuple(int(part or 0) for part in digits)
