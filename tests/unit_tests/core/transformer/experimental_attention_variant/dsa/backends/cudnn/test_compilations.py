"""Packed batches change their shapes every step; what the library compiles for them is bounded.

Keys of the emulator are the library's own cache keys: heads, widths and k everywhere, and for top-k the number of
columns rounded up to a power of two. On a GPU the library's caches are counted themselves, and those of the package's
own Triton kernels.
"""

import ast
import random
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends import cudnn as cudnn_backend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.scoring import scoring_operands
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


TRITON_FILES = ("quantize", "triton_lse", "triton_rows")
# Integers that a model fixes, and tensors that the launcher allocates: these may be specialized.
FIXED = {"heads", "width"}
ALLOCATED = {"q", "kv", "x", "codes", "scales", "kl", "out_target", "out_predict"}
WRITTEN = {"_lse_kernel": {"lse"}, "_kl_kernel": {"lse", "mass"}}
FLOATS = {"floor", "scale_log2"}


def kernel_parameters(file: str) -> dict[str, tuple[set[str], set[str]]]:
    """Of each Triton kernel of a file: its run-time parameters, and those named in ``do_not_specialize``."""
    source = (Path(cudnn_backend.__file__).parent / f"{file}.py").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            (decorator,) = node.decorator_list
            assert isinstance(decorator, ast.Call), f"{node.name} specializes every argument"
            (listed,) = (ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "do_not_specialize")
            found[node.name] = {a.arg for a in node.args.args if a.annotation is None}, set(listed)
    return found


@pytest.mark.parametrize("file", TRITON_FILES)
def test_triton_specializes_nothing_that_changes_from_batch_to_batch(file: str) -> None:
    """Triton ignores a name that is no parameter, and makes up to three variants of an integer, two of a pointer."""
    kernels = kernel_parameters(file)
    assert kernels
    for name, (parameters, listed) in kernels.items():
        assert parameters - listed <= FIXED | ALLOCATED | FLOATS | WRITTEN.get(name, set()), name
        assert listed <= parameters, name


def triton_variants() -> dict[str, int]:
    """Compiled variants of each of the package's own Triton kernels."""
    counts = {}
    for file in TRITON_FILES:
        module = sys.modules.get(f"{cudnn_backend.__name__}.{file}")
        for name, kernel in vars(module).items() if module else ():
            if hasattr(kernel, "device_caches"):
                counts[name] = sum(len(cache[0]) for cache in kernel.device_caches.values())
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_triton_compiles_one_variant_for_all_lengths(loss: str) -> None:
    """After one batch: none more for totals of 1, odd ones, multiples of 16, or documents of one token."""
    device = torch.device("cuda")
    step(loss, Layout.packed((0, 37, 90)), device)
    warm = triton_variants()
    assert warm["_kl_kernel"] > 0
    for lengths in ((1,), (16, 48), (1, 1, 30), (160,), (33, 1, 64, 7), (128, 5)):
        step(loss, Layout.packed(cases.offsets_of(lengths)), device)
    assert triton_variants() == warm


@pytest.mark.gpu
def test_triton_compiles_one_quantizer_for_all_lengths() -> None:
    config = cases.make_config(scoring_precision="fp8")
    for rows in (37, 1, 16, 160, 33):
        case = Case("packed", "off", 16, 32, 64, torch.bfloat16)
        indexer = cases.make_inputs(Layout.causal(1, rows), case, torch.device("cuda")).indexer
        scoring_operands(indexer, config)
        if rows == 37:
            warm = triton_variants()
    assert warm["_quantize_kernel"] > 0 and triton_variants() == warm
