"""Split layers, the shared-out vocabulary and experts against one process: outputs and every gradient.

One spawn of two processes checks all of it, in FP64 so that only a wrong sum can differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.cross_entropy import chunked_cross_entropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import parallel_input
from megatron.core.tensor_parallel.mappings import group_size, own_rows
from megatron.core.tensor_parallel.shards import own_region, split_of, sums_gradient_over_tp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.ranks import run_on_ranks
from tests.unit_tests.core.tiny_model import context_of, tiny_config

ROWS, HIDDEN, VOCAB = 12, 32, 14
SIZES: dict[str, ParallelSizes] = {
    "tp": ParallelSizes(2, tensor=2),
    "tp-sp": ParallelSizes(2, tensor=2),
    "ep": ParallelSizes(2, expert=2),
    "tp-ep": ParallelSizes(2, tensor=2, expert=2),
    "tp-sp-ep": ParallelSizes(2, tensor=2, expert=2),
}
# Documents of 5 and 4 rows; what is between them and behind is padding, on both ranks.
PACKED = PackedSeqParams.from_offsets((0, 5, 9), (0, 7, 12))
MLP_PARTS = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)


def make_config(mode: str) -> MLATransformerConfig:
    return tiny_config(
        params_dtype=torch.float64,
        sequence_parallel="sp" in mode,
        tensor_model_parallel_size=2 if "tp" in mode else 1,
        expert_model_parallel_size=2 if "ep" in mode else 1,
    )


def make(build: Callable[..., nn.Module], mode: str, groups: ProcessGroupCollection) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    config = make_config(mode)
    return build(config, groups), config


def rows_of(x: Tensor, config: Any, groups: ProcessGroupCollection) -> Tensor:
    """This rank's part of rows that lie as between layers."""
    return x[slice(*own_rows(len(x), groups.tp))] if config.sequence_parallel else x


def embedding(config: Any, groups: ProcessGroupCollection) -> nn.Module:
    return VocabParallelEmbedding(VOCAB + 2, HIDDEN, config=config, tp_group=groups.tp)


def dense_mlp(config: Any, groups: ProcessGroupCollection) -> nn.Module:
    return MLP(config, MLP_PARTS, pg_collection=groups)


def moe(config: Any, groups: ProcessGroupCollection) -> nn.Module:
    parts = MoESubmodules(TopKRouter, GroupedMLP, ModuleSpec(MLP, submodules=MLP_PARTS))
    return MoELayer(config, parts, layer_number=2, pg_collection=groups)


class Head(nn.Module):
    """Output layer and loss over a vocabulary that is padded, with ignored rows."""

    def __init__(self, config: Any, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.config, self.tp = config, groups.tp
        self.output = ColumnParallelLinear(HIDDEN, VOCAB, config=config, bias=True, tp_group=groups.tp)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(ROWS) % VOCAB
        target[3] = -100
        x = parallel_input(x, self.config, self.tp)
        whole = vocab_parallel_cross_entropy(self.output(x), target, tp_group=self.tp)
        chunked = chunked_cross_entropy(x, target, self.output, 5, self.tp)
        torch.testing.assert_close(whole, chunked)
        return whole + chunked


MODULES: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    "embedding": (embedding, ("tp", "tp-sp")),
    "mlp": (dense_mlp, ("tp", "tp-sp")),
    "head": (Head, ("tp", "tp-sp")),
    "moe": (moe, ("tp", "tp-sp", "ep", "tp-ep", "tp-sp-ep")),
    "moe-padded": (moe, ("tp", "tp-sp", "ep", "tp-ep", "tp-sp-ep")),
}


def run(name: str, mode: str, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Outputs of this rank, gradients (summed where they are partial), and where the weights stand."""
    module, config = make(MODULES[name][0], mode, groups)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    context = context_of(1, ROWS) if name == "moe" else context_of(packed=PACKED)
    if name == "embedding":
        out = module(torch.arange(ROWS) % VOCAB)
    else:
        leaf = rows_of(x, config, groups).clone().requires_grad_()
        out = module(leaf) if name == "head" else module(leaf, context)
    weight = weight[:, 0] if name == "head" else rows_of(weight, config, groups)
    (out * weight).sum().backward()
    result: dict[str, Any] = {"out": out.detach(), "region": {}, "split": {}, "grad": {}}
    if name != "embedding":
        result["dx"] = leaf.grad
    for key, parameter in module.named_parameters():
        gradient = parameter.grad
        split = split_of(parameter)
        if sums_gradient_over_tp(parameter):
            dist.all_reduce(gradient, group=groups.tp)
        if ".experts." in f".{key}" and "shared" not in key and split is None and group_size(groups.tp) > 1:
            dist.all_reduce(gradient)  # what sharding over all ranks that hold copies does
        result["grad"][key], result["region"][key] = gradient, own_region(parameter)
        result["split"][key] = None if split is None else split.axis
    result["load"] = dict(context.losses.expert_loads)
    return result


def refusals() -> list[str]:
    """What a shared-out vocabulary says of ids that no rank holds; -100 is no target."""
    groups = build_process_groups(SIZES["tp"], "cpu")
    table, _ = make(embedding, "tp", groups)
    half = torch.zeros(2, VOCAB // 2, dtype=torch.float64)
    said = []
    for token in (-1, VOCAB + 2):
        with pytest.raises(IndexError) as caught:
            table(torch.tensor([0, token]))
        said.append(str(caught.value))
    for target in (-1, VOCAB):
        with pytest.raises(IndexError) as caught:
            vocab_parallel_cross_entropy(half, torch.tensor([-100, target]), tp_group=groups.tp)
        said.append(str(caught.value))
    return said


def all_modes() -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for mode, sizes in SIZES.items():
        groups = build_process_groups(sizes, "cpu")
        for name, (_, modes) in MODULES.items():
            if mode in modes:
                results[name, mode] = run(name, mode, groups)
    return results


@cache
def on_two_ranks() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_on_ranks(2, all_modes)


@cache
def on_one(name: str) -> dict[str, Any]:
    return run(name, "", ProcessGroupCollection())


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, modes) in MODULES.items() for mode in modes])
def test_two_ranks_equal_one_process(name: str, mode: str) -> None:
    """Expert-parallel ranks without tensor parallelism see the same rows here, so experts see each row twice."""
    wanted, ranks = on_one(name), [results[name, mode] for results in on_two_ranks()]
    for key in ("out", "dx"):
        if key in wanted:
            got = [rank[key] for rank in ranks]
            shared_out = "sp" in mode and not (key == "out" and name == "head")
            for value in [torch.cat(got)] if shared_out else got:
                torch.testing.assert_close(value, wanted[key], atol=1e-12, rtol=1e-10)
    for rank in ranks:
        assert rank["grad"].keys() == wanted["grad"].keys()
        for key, gradient in rank["grad"].items():
            whole, region = rank["region"][key]
            repeats = 2 if rank["split"][key] == "ep" and "tp" not in mode else 1
            assert whole == wanted["grad"][key].shape
            torch.testing.assert_close(
                gradient,
                repeats * wanted["grad"][key][region],
                atol=1e-12,
                rtol=1e-10,
                msg=lambda m, k=key: f"{k}: {m}",
            )
    assert any(rank["split"].values() for rank in ranks), "nothing was split"


@pytest.mark.parametrize("mode", MODULES["moe"][1])
def test_padding_moves_no_expert_count(mode: str) -> None:
    (wanted,) = on_one("moe-padded")["load"].values()
    loads = [next(iter(rank["moe-padded", mode]["load"].values())) for rank in on_two_ranks()]
    assert int(wanted.sum()) == 9 * 2
    total = sum(loads) if "tp" in mode else loads[0]
    assert torch.equal(total, wanted)


def test_weights_are_drawn_whole() -> None:
    """Every rank starts from its part of what one process draws."""
    config = tiny_config()
    torch.manual_seed(3)
    whole = ColumnParallelLinear(6, 8, config=config, num_stacked=2)
    for rank in range(2):
        torch.manual_seed(3)
        part = ColumnParallelLinear(6, 8, config=config, num_stacked=2, tp_group=_Fake(rank))  # type: ignore[arg-type]
        assert part.weight.shape == (2, 4, 6)
        assert torch.equal(part.weight, whole.weight[:, 4 * rank : 4 * rank + 4])
    assert F.linear(torch.ones(6), part.weight.flatten(0, 1)).shape == (8,)


def test_a_width_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[5, 6\] does not split over 2 ranks.*tensor_model_parallel_size"):
        ColumnParallelLinear(6, 5, config=tiny_config(), tp_group=_Fake(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of expert_model_parallel_size"):
        GroupedMLP(tiny_config(num_moe_experts=3), ProcessGroupCollection(ep=_Fake(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "message"), [((6, 4, 1, 1), "tensor_model_parallel_size=4"), ((6, 1, 1, 4), "=4")])
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSizes(*sizes)


class _Fake:
    """Stands for one rank of two; nothing is ever sent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


def test_ids_that_no_rank_holds_are_refused() -> None:
    """Each rank would take them for another's: a loss that looks plausible."""
    for said in run_on_ranks(2, refusals):
        assert said == [
            "Token id -1 is out of range: ids go from 0 to 15.",
            "Token id 16 is out of range: ids go from 0 to 15.",
            "Target -1 is out of range: ids go from 0 to 13.",
            "Target 14 is out of range: ids go from 0 to 13.",
        ]
