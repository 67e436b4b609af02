"""The FP8 golden files under tests/fixtures/fp8, and copies of a module with one rule changed.

Files 01 to 12 hold scoring operands and what an independent integer implementation of E4M3 and of the scale rule makes
of them: codes, scales, head weights, logits with a bound for any order of FP32 sums, and the selected keys. File 13
holds raw projections and what each inference engine's rounding policy makes of them.
"""

import gzip
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.config import DSAConfig
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

FIXTURES = Path(__file__).resolve().parents[5] / "fixtures" / "fp8"
FILES = {path.name[:2]: path for path in sorted(FIXTURES.glob("*.safetensors.gz"))}
FINITE = [number for number in FILES if number not in ("12", "13")]
POLICIES = "13"
HEAD_DIM = 128


@cache
def golden(number: str) -> dict[str, Tensor]:
    """The tensors of one file; do not change them."""
    return load(gzip.decompress(FILES[number].read_bytes()))


def is_exact(number: str) -> bool:
    """Whether every order of sums gives the same logits."""
    return number in ("01", "02")


def operands(number: str) -> IndexerInputs:
    """What the indexer hands over: q, k, and the gate scaled in FP32."""
    file = golden(number)
    return IndexerInputs(file["q"], file["k"], file["gate"] * (file["q"].shape[1] * HEAD_DIM) ** -0.5)


def visible(number: str) -> Tensor:
    """Bool ``[T, S]``."""
    file = golden(number)
    keys = torch.arange(int(file["ke"].max()))
    return (keys >= file["ks"][:, None]) & (keys < file["ke"][:, None])


def layout(number: str) -> Layout:
    """The file's documents as a packed layout."""
    starts = golden(number)["ks"].unique().tolist()
    return Layout.packed((*starts, golden(number)["k"].shape[0]))


def fp8_config(number: str, **options: object) -> DSAConfig:
    """A configuration that scores in FP8: its gates want the kernels, and the reference runs it as their oracle."""
    file = golden(number)
    values: dict[str, object] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_head_dim": 8, "qk_pos_emb_head_dim": 64, "layernorm_epsilon": 1e-6, "head_dim": HEAD_DIM,
        "n_heads": file["q"].shape[1], "topk": file["topk_ids"].shape[1], "kernel_backend": "cudnn",
        "scoring_precision": "fp8",
    }  # fmt: skip
    return DSAConfig(**{**values, **options})  # type: ignore[arg-type]


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and -0.0 differs from 0.0."""
    return x.contiguous().view(torch.uint8)


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of ``module`` in which one piece of source, found exactly once, is replaced."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    changed = ModuleType(module.__name__)
    changed.__dict__.update(__package__=module.__package__, __file__=module.__file__)
    assert module.__name__ in sys.modules
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    return changed
