"""Model FLOPs of a step: what the mathematics needs, whatever a kernel repeats, pads or recomputes.

One multiply-add is 2 FLOPs; only products of matrices count. Per token and layer, with h hidden, H heads, n/r/v head
widths (plain, rotary, value), q/kv ranks a and c, and absorbed MLA:

    projections   h a + a H (n + r) + h (c + r) + H n c + H c v + H v h          times 3: forward and two gradients
    MLP           3 h f (dense); h E + 3 h (top-k f_e + f_shared) (MoE)          times 3
    output layer  h vocabulary                                                   times 3
    attention     H ((c + r) + c) for each selected pair of row and key          times 3

The lightning indexer (I heads of width D) counts on the layers that own one:

    projections   a I D + h D + h I       forward; again for weight gradients where it trains (inputs are detached)
    scores        I D for each visible pair, forward; twice more for each pair under the loss where it trains
    teacher       H (c + r) for each pair under the loss where it trains

Pairs under the loss are the selected ones with the sparse loss and all visible ones with the dense loss. Evaluation
and activation recompute add nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.transformer.transformer_config import MLATransformerConfig

# Dense BF16 tensor-core peaks by a part of the device's name, from NVIDIA's data sheets; the first match counts.
_PEAK_FLOPS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense BF16 peak of a device in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


@dataclass(frozen=True)
class Workload:
    """What some documents ask of a model: tokens, and pairs of a row and a key that it sees or selects."""

    tokens: int = 0
    visible_pairs: int = 0
    selected_pairs: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int], topk: int | None) -> Workload:
        """Causal documents of the given lengths; ``topk`` None selects every visible key."""
        tokens = visible = selected = 0
        for length in lengths:
            tokens += length
            visible += length * (length + 1) // 2
            full = length if topk is None else min(length, topk)
            selected += full * (full + 1) // 2 + (length - full) * full
        return cls(tokens, visible, selected)

    def __add__(self, other: Workload) -> Workload:
        return Workload(
            self.tokens + other.tokens,
            self.visible_pairs + other.visible_pairs,
            self.selected_pairs + other.selected_pairs,
        )


def training_flops(config: MLATransformerConfig, work: Workload) -> float:
    """FLOPs of one forward and backward pass over ``work``."""
    layers = range(1, config.num_layers + 1)
    matmuls = sum(_projections(config) + _mlp(config, layer) for layer in layers)
    matmuls += config.hidden_size * config.padded_vocab_size
    pair = config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_pos_emb_head_dim)
    total = 3 * (matmuls * work.tokens + config.num_layers * pair * work.selected_pairs)
    return 2.0 * (total + _indexers(config, work))


def _projections(config: MLATransformerConfig) -> int:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    assert config.q_lora_rank is not None
    query = config.q_lora_rank * (hidden + heads * (config.qk_head_dim + config.qk_pos_emb_head_dim))
    absorbed = heads * rank * (config.qk_head_dim + config.v_head_dim)
    return query + hidden * (rank + config.qk_pos_emb_head_dim) + absorbed + heads * config.v_head_dim * hidden


def _mlp(config: MLATransformerConfig, layer_number: int) -> int:
    if not config.is_moe_layer(layer_number):
        return 3 * config.hidden_size * (config.ffn_hidden_size or 0)
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    width += config.moe_shared_expert_intermediate_size or 0
    return config.hidden_size * ((config.num_moe_experts or 0) + 3 * width)


def _indexers(config: MLATransformerConfig, work: Workload) -> int:
    if config.experimental_attention_variant != "dsa":
        return 0
    dsa = config.dsa_config()
    owners = sum(dsa.computes_topk(layer) for layer in range(1, config.num_layers + 1))
    projections = dsa.q_lora_rank * dsa.n_heads * dsa.head_dim + config.hidden_size * (dsa.head_dim + dsa.n_heads)
    score = dsa.n_heads * dsa.head_dim
    layer = projections * work.tokens + score * work.visible_pairs
    if dsa.loss_enabled:
        pairs = work.selected_pairs if dsa.use_sparse_loss else work.visible_pairs
        teacher = config.num_attention_heads * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        layer += projections * work.tokens + (2 * score + teacher) * pairs
    return owners * layer
