"""Memory and time of a training step over many GPUs, by the formulas of parallelism.md.

    python docs/estimate_parallelism.py

Prints that page's tables. Nothing here is measured; the rates below are assumptions, and no communication is taken to
overlap with computation.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.models.gpt import build_gpt_model, get_preset
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.flops import Workload, training_flops

TOKENS = 131072
FLOPS = 400e12  # of one GPU, over everything that it multiplies
NVLINK, NETWORK = 350e9, 40e9  # bytes a second and GPU, one way
GPUS_PER_NODE = 8
GIB = 2**30
CAPACITY = 141e9 / GIB


@dataclasses.dataclass(frozen=True)
class Sizes:
    world: int
    tp: int
    cp: int
    ep: int

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Counts: routed experts, split over tp, whole on each tp rank, and those of the largest layer."""

    experts: int
    split: int
    whole: int
    layer_experts: int
    layer_dense: int


def count(config: MLATransformerConfig) -> Parameters:
    whole_names = ("norm", "down_proj", "indexer", "router")
    experts = split = whole = layer_experts = layer_dense = 0
    for name, parameter in build_gpt_model(config, device="meta").named_parameters():
        number, last = parameter.numel(), name.startswith(f"decoder.layers.{config.num_layers - 1}.")
        if ".experts." in name:
            experts += number
            layer_experts += number * last
        else:
            is_whole = any(part in name for part in whole_names)
            whole, split = whole + number * is_whole, split + number * (not is_whole)
            layer_dense += number * last
    return Parameters(experts, split, whole, layer_experts, layer_dense)


def memory(config: MLATransformerConfig, p: Parameters, s: Sizes) -> dict[str, float]:
    """GiB a GPU, by kind; full recompute, one sequence a micro-batch, sequence parallelism."""
    rows, hidden = TOKENS / s.cp, config.hidden_size
    heads, width = config.num_attention_heads / s.tp, 2 * config.kv_lora_rank + config.qk_pos_emb_head_dim
    owners = sum(config.dsa_config().computes_topk(n) for n in range(1, config.num_layers + 1))
    layer = p.layer_experts / s.ep + p.layer_dense
    copies = rows / s.tp * config.moe_router_topk
    kinds = {
        "state": 16 * (p.experts + p.split + p.whole * s.tp) / s.world,
        "gathered": (2 * 2 + 2 + 4) * layer,
        "kept": config.num_layers * rows / s.tp * hidden * 2 + owners * rows * (config.dsa_indexer_topk or 0) * 4,
        "working": 2 * rows * heads * width * 2 + copies * 2 * (4 * hidden + 6 * (config.moe_ffn_hidden_size or 0)),
    }
    return {kind: value / GIB for kind, value in kinds.items()}


def seconds(config: MLATransformerConfig, p: Parameters, s: Sizes) -> dict[str, float]:
    """Seconds a step of one micro-batch, by cause."""
    flops = training_flops(config, Workload.of([TOKENS], config.dsa_indexer_topk)) * 4 / 3
    rows, hidden = TOKENS / s.cp, config.hidden_size
    key = (config.kv_lora_rank + config.qk_pos_emb_head_dim + (config.dsa_indexer_head_dim or 0)) * 2
    out = (s.tp - 1) / s.tp
    forward = out * rows * (2 * ((config.q_lora_rank or 0) + 3 * hidden) + key + 4 * (config.dsa_indexer_topk or 0))
    moe_layers = sum(config.is_moe_layer(n) for n in range(1, config.num_layers + 1))
    far = 1 - min(GPUS_PER_NODE / s.ep, 1)
    exchange = 6 * rows / s.tp * config.moe_router_topk * hidden * 2 * moe_layers
    weights = (2 * 2 + 4) * (p.experts / s.ep * (s.world > s.ep) + p.split / s.tp + p.whole)
    return {
        "compute": flops / (s.tp * s.cp) / FLOPS,
        "tp": 3 * forward * config.num_layers / NVLINK,
        "cp": 3 * (s.cp - 1) / s.cp * TOKENS * key * config.num_layers / NETWORK,
        "ep": exchange * (far / NETWORK + (1 - far) / NVLINK),
        "fsdp": weights / NETWORK,
    }


def table(name: str) -> None:
    config = dataclasses.replace(get_preset(name), dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=True)
    p = count(config)
    print(
        f"\n{name}: {p.experts / 1e9:.1f}B in experts, {p.split / 1e9:.1f}B split over tp, {p.whole / 1e9:.2f}B whole\n"
    )
    heads = "GPUs|tp x cp x dp|ep|state|gathered|kept|working|sum GiB|fits|compute s|tp s|cp s|ep s|fsdp s|sum s"
    print("| " + heads.replace("|", " | ") + " | tokens/s/GPU |\n|" + "--:|" * 16)
    for world in (64, 128, 256, 512, 1024, 2048):
        sizes = Sizes(world, 8, 8, 64)
        gib, time = memory(config, p, sizes), seconds(config, p, sizes)
        total, step = sum(gib.values()), sum(time.values())
        fits = "yes" if total < 0.92 * CAPACITY else "no"
        shown = [f"{value:.1f}" for value in gib.values()] + [f"{total:.0f}", fits]
        shown += [f"{value:.1f}" for value in time.values()] + [
            f"{step:.1f}",
            f"{sizes.dp * TOKENS / step / world:.0f}",
        ]
        print(f"| {world} | 8 x 8 x {sizes.dp} | {sizes.ep} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    for preset in ("glm-5.2", "deepseek-v3.2"):
        table(preset)
