"""What the kernels accept on this machine, asked once, when a module is built.

Versions, architectures and shape limits live here and in ``frontend.py`` alone. Each refusal is one sentence: option,
value, limit, remedy. Nothing of the GPU stack is imported: packages are looked up by their metadata, so the question
can be asked on a CPU machine too.

Measured on SM 9.0 alone. Blackwell has kernels of its own behind the same names, which nobody has run through this
wiring, so it is refused by name instead of being tried.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from ...config import DSAConfig

FRONTEND_PACKAGE = "nvidia-cudnn-frontend"
FRONTEND_MINIMUM = (1, 32)
INDEXER_HEAD_DIM = 128
MAX_INDEXER_HEADS = 64
FP8_INDEXER_HEADS = (32, 64)
LATENT_WIDTH = 512
ROPE_WIDTHS = (0, 64)
MAX_TOPK = 2048


def unsupported(config: DSAConfig, device: torch.device) -> str | None:
    """The first reason why ``config`` cannot run on ``device``, or None."""
    return _shape_reason(config) or _device_reason(device) or _package_reason(config)


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


def _package_reason(config: DSAConfig) -> str | None:
    installed = _installed_version(FRONTEND_PACKAGE)
    needed = ".".join(map(str, FRONTEND_MINIMUM))
    if installed is None or find_spec("cutlass") is None:
        return (
            f"dsa_kernel_backend='cudnn' needs {FRONTEND_PACKAGE} {needed} or newer with its CuTe DSL, which is not "
            f"installed: pip install '{FRONTEND_PACKAGE}[cutedsl]>={needed}'."
        )
    if _release(installed) < FRONTEND_MINIMUM:
        return (
            f"dsa_kernel_backend='cudnn' needs {FRONTEND_PACKAGE} {needed} or newer, but {installed} is installed: "
            f"pip install '{FRONTEND_PACKAGE}[cutedsl]>={needed}'."
        )
    if find_spec("flash_mla") is None:
        return (
            "dsa_kernel_backend='cudnn' runs sparse attention on FlashMLA, which is not installed: "
            "pip install 'sgl-flash-mla>=1.0'."
        )
    fp8 = config.scoring_precision == "fp8"
    if (config.loss_enabled or fp8) and find_spec("triton") is None:
        needs = "scoring_precision='fp8'" if fp8 else f"loss_coeff={config.loss_coeff}"
        return (
            f"dsa_indexer_{needs} needs Triton with dsa_kernel_backend='cudnn', which is not installed: pip install "
            "triton."
        )
    return None


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    digits = ["".join(c for c in part if c.isdigit()) for part in text.split(".")[: len(FRONTEND_MINIMUM)]]
    return tuple(int(part or 0) for part in digits)
