"""Multi-latent attention (DeepSeek-V2, section 2.1), absorbed: every head attends to one shared latent key.

    q_latent = norm(q_down(x))           q = q_up(q_latent), per head [nope | rope]
    [kv_latent | k_rope] = kv_down(x)    kv_latent = norm(kv_latent); k_rope is one head, not normed
    kv_up, per head [k_nope | value], is never applied to the keys: its key half goes into the queries, its value half
    onto the attention's output.

The halves come from one call of ``linear_kv_up_proj`` on an identity of size ``kv_lora_rank``, not from its weight, so
that forward hooks, sharded storage and low-rank adapters act on them. Everything is token-major.

Tensor-parallel ranks share out the heads. The latents are computed on the rows that this rank holds (its own with
sequence parallelism, else all); the query latent enters the parallel region before its up-projection, the keys where
the core attention gathers them.

The core attention gets absorbed queries ``[T, H, L + P]``, keys ``[S, L + P]``, the layer's input and the normed query
latent (which the DSA indexer reads), and the value half.

Left out: MLA without a query latent, and caches for generation.

Legend: T rows, S keys, H heads, L kv_lora_rank, P rotary width, N width without rotary embedding, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.common.embeddings import apply_rotary_pos_emb, build_rotary_embedding, softmax_scale
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.initialization import scaled_init_method_normal
from megatron.core.tensor_parallel.layers import parallel_input
from megatron.core.tensor_parallel.mappings import own_rows
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig


@dataclass
class MLASelfAttentionSubmodules:
    """Specs of the parts, under Megatron's names."""

    linear_q_down_proj: Any
    linear_q_up_proj: Any
    linear_kv_down_proj: Any
    linear_kv_up_proj: Any
    q_layernorm: Any
    kv_layernorm: Any
    core_attention: Any
    linear_proj: Any


class MLASelfAttention(MegatronModule):
    """Self-attention of one layer.

    Args:
        config: MLA and rotary fields.
        submodules: specs of projections, norms and core attention.
        layer_number: 1-based.
        pg_collection: process groups; None in one process.
    """

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert config.q_lora_rank is not None
        self.layer_number = layer_number
        self.tp_group = None if pg_collection is None else pg_collection.tp
        heads, hidden, q_rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
        latent, rope, nope, value = self._widths()
        tp: dict[str, Any] = {"config": config, "tp_group": self.tp_group}
        self.linear_q_down_proj = build_module(submodules.linear_q_down_proj, hidden, q_rank, config=config)
        self.linear_q_up_proj = build_module(submodules.linear_q_up_proj, q_rank, heads * (nope + rope), **tp)
        self.linear_kv_down_proj = build_module(submodules.linear_kv_down_proj, hidden, latent + rope, config=config)
        self.linear_kv_up_proj = build_module(submodules.linear_kv_up_proj, latent, heads * (nope + value), **tp)
        eps = config.attention_latent_norm_epsilon
        self.q_layernorm = build_module(submodules.q_layernorm, config=config, hidden_size=q_rank, eps=eps)
        self.kv_layernorm = build_module(submodules.kv_layernorm, config=config, hidden_size=latent, eps=eps)
        self.rotary = build_rotary_embedding(config)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            softmax_scale=softmax_scale(config),
            pg_collection=pg_collection,
        )
        output_init = scaled_init_method_normal(config.init_method_std, config.num_layers)
        self.linear_proj = build_module(submodules.linear_proj, heads * value, hidden, init_method=output_init, **tp)

    def forward(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """``[T, hidden]``, after the layer's input norm -> ``[T, hidden]``; own rows with sequence parallelism."""
        latent, rope, nope, value = self._widths()
        cos, sin = self.rotary(context.positions_T, hidden_states.dtype)
        interleaved = self.config.mla_rotary_interleaved

        q_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        q_heads = self.linear_q_up_proj(parallel_input(q_latent, self.config, self.tp_group))
        q_heads = q_heads.unflatten(-1, (-1, nope + rope))
        q_nope, q_rope = q_heads.split((nope, rope), dim=-1)
        kv_latent, k_rope = self.linear_kv_down_proj(hidden_states).split((latent, rope), dim=-1)
        up_k_LHN, up_v_LHV = self._up_projection(hidden_states).split((nope, value), dim=-1)

        q_absorbed = torch.einsum("thn,lhn->thl", q_nope, up_k_LHN)
        query = torch.cat((q_absorbed, apply_rotary_pos_emb(q_rope, cos, sin, interleaved)), dim=-1)
        held = self._held_rows(context)
        k_rotated = apply_rotary_pos_emb(k_rope, cos[held], sin[held], interleaved)
        key = torch.cat((self.kv_layernorm(kv_latent), k_rotated), dim=-1)
        output = self.core_attention(
            query, key, x=hidden_states, qr=q_latent, up_v_weight=up_v_LHV.permute(1, 2, 0), context=context
        )
        return self.linear_proj(output)

    def _up_projection(self, like: Tensor) -> Tensor:
        """The up-projection of every latent channel, ``[L, H, N + V]``."""
        latent, _, nope, value = self._widths()
        identity = torch.eye(latent, dtype=like.dtype, device=like.device)
        return self.linear_kv_up_proj(identity).unflatten(-1, (-1, nope + value))

    def _held_rows(self, context: ForwardContext) -> slice:
        """Rows of the layout that ``hidden_states`` holds."""
        return slice(*own_rows(context.layout.num_rows, self.tp_group if self.config.sequence_parallel else None))

    def _widths(self) -> tuple[int, int, int, int]:
        config = self.config
        return config.kv_lora_rank, config.qk_pos_emb_head_dim, config.qk_head_dim, config.v_head_dim
