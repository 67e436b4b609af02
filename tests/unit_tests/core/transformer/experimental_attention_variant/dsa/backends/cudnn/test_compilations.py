"""Packed batches change their shapes every step; what the library compiles for them is bounded.

Keys of the emulator are the library's own cache keys: heads, widths and k everywhere, and for top-k the number of
columns rounded up to a power of two. On a GPU the library's caches are counted themselves.
"""

import random
import sys
from types import FunctionType

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

from .. import cases
from ..cases import Case
from ..emulator import Emulator
from ..test_backends import run

BATCHES, WARMUP = 50, 20


def packed_batch(random_source: random.Random, longest: int) -> Layout:
    lengths = tuple(random_source.randint(1, longest) for _ in range(random_source.randint(1, 6)))
    return Layout.packed(cases.offsets_of(lengths))


def step(loss: str, layout: Layout, device: torch.device) -> None:
    case = Case("packed", loss, 16, 16, 64, torch.bfloat16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, device)
    run(backend, inputs, backend.select(inputs.indexer, layout, 64), layout, loss)


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_compilations_after_warm_up_are_top_k_buckets_at_most(loss: str, emulated: Emulator) -> None:
    source = random.Random(0)
    for _ in range(12):
        step(loss, packed_batch(source, 24), torch.device("cpu"))
    warm = set(emulated.compiled)
    for _ in range(12):
        step(loss, packed_batch(source, 24), torch.device("cpu"))
    fresh = {key[0] for key in emulated.compiled - warm}
    assert fresh <= {"indexer_top_k"} and len(emulated.compiled - warm) <= 2
    assert len({key for key in emulated.compiled if key[0] == "indexer_top_k"}) <= 2 * 6, "column buckets, row classes"


def compiled_kernels() -> tuple[int, int]:
    """Entries of the library's compile caches: those of top-k, and all others."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("cudnn.deepseek_sparse")}
    top_k: dict[int, int] = {}
    others: dict[int, int] = {}
    for name, module in modules.items():
        holders = [vars(module), *(vars(x) for x in vars(module).values() if isinstance(x, FunctionType))]
        for attribute, value in [item for holder in holders for item in holder.items()]:
            if "compile_cache" in attribute and isinstance(value, dict):
                (top_k if "top_k" in name else others)[id(value)] = len(value)
    return sum(top_k.values()), sum(others.values())


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_the_library_compiles_nothing_new_but_top_k_buckets(loss: str) -> None:
    source, device, longest = random.Random(0), torch.device("cuda"), 900
    for _ in range(WARMUP):
        step(loss, packed_batch(source, longest), device)
    _, warm = compiled_kernels()
    assert warm > 0
    before = compiled_kernels()[0]
    for _ in range(BATCHES):
        step(loss, packed_batch(source, longest), device)
    buckets, others = compiled_kernels()
    assert others == warm
    # Power-of-two columns, few or many rows: however long training runs, no more than this.
    assert buckets - before <= 2 * longest.bit_length()
