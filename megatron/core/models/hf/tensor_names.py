"""The table of tensor names: Hugging Face's hub layout against the parameters of GPTModel.

Every Hugging Face tensor is a ``Slot``: a rectangular part of one of our tensors. Nothing is permuted or transposed
in either direction. Gated first layers are stored ``[2, ffn, hidden]`` (0 gate, 1 up) and experts are stacked in front,
so one of our tensors can be many slots; embedding tables are padded behind the vocabulary's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.transformer.transformer_config import MLATransformerConfig


@dataclass(frozen=True)
class Slot:
    """Hugging Face tensor ``hf`` is ``ours[index][:rows]`` (all rows if None)."""

    hf: str
    ours: str
    index: tuple[int, ...] = ()
    rows: int | None = None

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of our whole tensor that holds this slot."""
        return tensor[self.index][: self.rows] if self.rows is not None else tensor[self.index]


_ATTENTION = {
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "q_layernorm.weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_layernorm.weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
}

_INDEXER = {
    "wq_b.weight": "linear_wq_b.weight",
    "wk.weight": "linear_wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "weights_proj.weight": "linear_weights_proj.weight",
}

_BLOCK_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}


def tensor_slots(config: MLATransformerConfig) -> Iterator[Slot]:
    """Every tensor of a Hugging Face checkpoint of this model, in the order of the layers."""
    yield Slot("model.embed_tokens.weight", "embedding.word_embeddings.weight", rows=config.vocab_size)
    dsa = config.dsa_config()
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        yield from _renamed(_BLOCK_NORMS, theirs, ours)
        yield from _renamed(_ATTENTION, f"{theirs}self_attn.", f"{ours}self_attention.")
        if dsa.computes_topk(layer + 1):
            yield from _renamed(
                _INDEXER, f"{theirs}self_attn.indexer.", f"{ours}self_attention.core_attention.indexer."
            )
        if config.is_moe_layer(layer + 1):
            yield from _moe(config, f"{theirs}mlp.", f"{ours}mlp.")
        else:
            yield from _gated_mlp(f"{theirs}mlp.", f"{ours}mlp.")
    yield Slot("model.norm.weight", "decoder.final_layernorm.weight")
    if config.untie_embeddings_and_output_weights:
        yield Slot("lm_head.weight", "output_layer.weight", rows=config.vocab_size)


def _renamed(names: dict[str, str], theirs: str, ours: str) -> Iterator[Slot]:
    for hf, our in names.items():
        yield Slot(theirs + hf, ours + our)


def _gated_mlp(theirs: str, ours: str, index: tuple[int, ...] = ()) -> Iterator[Slot]:
    yield Slot(f"{theirs}gate_proj.weight", f"{ours}linear_fc1.weight", (*index, 0))
    yield Slot(f"{theirs}up_proj.weight", f"{ours}linear_fc1.weight", (*index, 1))
    yield Slot(f"{theirs}down_proj.weight", f"{ours}linear_fc2.weight", index)


def _moe(config: MLATransformerConfig, theirs: str, ours: str) -> Iterator[Slot]:
    assert config.num_moe_experts is not None
    yield Slot(f"{theirs}gate.weight", f"{ours}router.weight")
    yield Slot(f"{theirs}gate.e_score_correction_bias", f"{ours}router.expert_bias")
    for expert in range(config.num_moe_experts):
        yield from _gated_mlp(f"{theirs}experts.{expert}.", f"{ours}experts.", (expert,))
    yield from _gated_mlp(f"{theirs}shared_experts.", f"{ours}shared_experts.")
