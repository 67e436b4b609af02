"""The golden models under tests/fixtures/hf, and what the tests of import and export share.

Each folder holds a small model's config.json and weights, token ids, and what transformers 5.24.0 computed from them
in FP32 (eager attention) on a CPU: hidden states, attention outputs, index scores, selected keys, router choices,
head-mean attention probabilities, logits, and the gradients of the mean LM loss.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures" / "hf"
NAMES = ("a_glm_plain", "b_glm_indexshare", "c_v32_yarn", "d_glm_short")


@cache
def hf_config(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


@cache
def load_meta(name: str) -> dict[str, Any]:
    """Margins, the loss, and how far each typical mistake moves the model ("sensitivity")."""
    return json.loads((FIXTURES / name / "meta.json").read_text())


@cache
def tensors(name: str, file: str) -> dict[str, torch.Tensor]:
    """The tensors of one file ("model", "inputs", "outputs", "grads") of a golden model; do not change them."""
    return load_file(FIXTURES / name / f"{file}.safetensors")


def torch_positions(count: int) -> torch.Tensor:
    return torch.arange(count)
