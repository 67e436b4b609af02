"""The operators that training steps really run, in one process and over ranks."""

import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training import pretrain_gpt
from megatron.training.arguments import parse_args
from tests.functional_tests.runs import DATA, MODEL, TRAINING

from .dispatches import ACCUMULATING

# PyTorch's own names of what the scanner knows by other ones, or cannot see.
_WATCHED = ACCUMULATING | {
    "_grouped_mm", "_index_put_impl_", "_unsafe_index_put", "embedding_dense_backward", "index",
    "masked_scatter_backward",
}  # fmt: skip

# The smallest widths that the cudnn backend takes.
KERNEL_SHAPES = (
    "--dsa-kernel-backend cudnn --device cuda --bf16 --num-attention-heads 16 --kv-lora-rank 512 "
    "--qk-pos-emb-head-dim 64 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128"
).split()


class Operators(TorchDispatchMode):
    """Notes the names of what runs inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))

    @property
    def accumulating(self) -> set[str]:
        """Those whose sums have an order, fused attention included."""
        return {name for name in self.names if name in _WATCHED or "scaled_dot_product" in name}


def train_some(options: list[str], folder: Path) -> None:
    """Two training steps."""
    run = ["--train-iters", "2", "--eval-iters", "0", "--log-dir", str(folder)]
    with ExitStack() as stack:
        assert pretrain_gpt.start(parse_args([*MODEL, *DATA, *TRAINING, *options, *run]), stack).run() == 0


def join_as_torchrun_does() -> None:
    """Let a rank that is in a group already train from the command line."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    pretrain_gpt.process_group = lambda *_: nullcontext()
