"""Weight initialization that depends on the seed and on a module's name, and on nothing else.

Drawing all weights from one stream would give every layer other numbers as soon as one module more or less is built
(an indexer, a shared expert, another rank's shard). Here each module draws from a stream of its own, seeded with its
name, so that a run with another number of indexers, or with frozen ones, starts from the same backbone.

The distributions are Megatron's: normal with ``init_method_std``, and ``init_method_std / sqrt(2 * num_layers)`` for
the projections that write into the residual stream.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], Tensor]

# A stream's seed is the run's seed times this odd number (from SplitMix64) plus a hash of the name: neighbouring run
# seeds share no stream.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def init_method_normal(std: float) -> InitMethod:
    """Normal with mean 0 and standard deviation ``std``."""

    return partial(nn.init.normal_, mean=0.0, std=std)  # a closure could not be pickled


def scaled_init_method_normal(std: float, num_layers: int) -> InitMethod:
    """``init_method_normal`` for projections into the residual stream, of which there are ``2 * num_layers``."""
    return init_method_normal(std / math.sqrt(2.0 * num_layers))


def initialize_weights(model: nn.Module, seed: int | None = None) -> None:
    """Call ``reset_parameters`` of every module that has one, each with a random stream of its own name.

    Args:
        model: its module names must be final: call this before wrapping anything. Parameters on the meta device are
            left alone (materialize them, then call again).
        seed: of the run; ``torch.initial_seed()``, i.e. what ``torch.manual_seed`` was last given, when None.

    The global random streams are left as they were.
    """
    seed = torch.initial_seed() if seed is None else seed
    cuda_devices = {p.device.index for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(cuda_devices)):
        for name, module in model.named_modules():
            parameters = list(module.parameters(recurse=False))
            if not hasattr(module, "reset_parameters") or any(p.is_meta for p in parameters):
                continue
            torch.manual_seed((seed * _SEED_STRIDE + zlib.crc32(name.encode())) % 2**63)
            module.reset_parameters()
