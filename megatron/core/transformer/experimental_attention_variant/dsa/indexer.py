"""The lightning indexer: hidden states and query latents in, scoring operands out.

    q = rope(wq_b(q_latent))        per head, the first qk_pos_emb_head_dim channels rotated
    k = rope(k_norm(wk(x)))         one key head; k_norm is a LayerNorm (mean removed, with bias), not an RMSNorm
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5

q_latent arrives *after* its RMSNorm. An optional Hadamard rotation follows RoPE. The head weights are upcast to FP32
right after their projection and nothing rounds them again. q and k travel in the model's dtype, or in FP32 from the key
norm on with ``rope_fp32``; what they are scored in is the scoring boundary's business (``precision.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.common.embeddings import apply_rotary_pos_emb, build_rotary_embedding
from megatron.core.transformer.spec_utils import build_module

from .backends.protocol import IndexerInputs
from .config import DSAConfig
from .context_parallel import RowShards
from .precision import compute_dtype, hadamard_rotate


@dataclass
class DSAIndexerSubmodules:
    """Specs of the indexer's layers, under Megatron's names."""

    linear_wq_b: Any = None
    linear_wk: Any = None
    k_norm: Any = None
    linear_weights_proj: Any = None


class IndexerKeyNorm(nn.Module):
    """LayerNorm of the indexer's keys.

    With ``dsa_indexer_k_norm_fp32`` the parameters are FP32, whatever the model's dtype; with
    ``dsa_indexer_rope_fp32`` the result is FP32 too.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        dsa = DSAConfig.from_transformer_config(config)
        dtype = torch.float32 if dsa.k_norm_fp32 else config.params_dtype
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.eps, self.keep_fp32 = eps, dsa.rope_fp32

    def reset_parameters(self) -> None:
        """Weight one, bias zero: for parameters that were materialized after construction."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, k_TD: Tensor) -> Tensor:
        """Normalize over the last dimension; arithmetic is FP32 (FP64 for FP64 keys)."""
        dtype = compute_dtype(k_TD)
        normed = F.layer_norm(k_TD.to(dtype), self.weight.shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)
        return normed if self.keep_fp32 else normed.to(k_TD.dtype)


class DSAIndexer(nn.Module):
    """Projects hidden states into the operands that backends score (DeepSeek-V3.2, section 2.1 of the report).

    Args:
        config: a ``TransformerConfig`` with ``experimental_attention_variant="dsa"``.
        submodules: specs of the four layers.
        pg_collection: process groups, as large as ``config`` says; the weights are replicated, so a single process
            needs none.

    Raises:
        ValueError: a group has another size.
    """

    def __init__(self, config: Any, submodules: DSAIndexerSubmodules, pg_collection: Any = None) -> None:
        super().__init__()
        self.dsa = dsa = DSAConfig.from_transformer_config(config)
        RowShards.of(pg_collection, dsa.sequence_parallel).require_sizes(dsa)
        width = dsa.n_heads * dsa.head_dim
        eps = dsa.layernorm_epsilon if dsa.k_norm_epsilon is None else dsa.k_norm_epsilon
        self.linear_wq_b = build_module(submodules.linear_wq_b, dsa.q_lora_rank, width, config=config)
        self.linear_wk = build_module(submodules.linear_wk, dsa.hidden_size, dsa.head_dim, config=config)
        self.k_norm = build_module(
            submodules.k_norm or IndexerKeyNorm, config=config, hidden_size=dsa.head_dim, eps=eps
        )
        self.linear_weights_proj = build_module(
            submodules.linear_weights_proj, dsa.hidden_size, dsa.n_heads, config=config
        )
        self.rotary = build_rotary_embedding(config)

    def forward(self, x_TC: Tensor, q_latent_TR: Tensor, positions_T: Tensor) -> IndexerInputs:
        """Operands of these rows: q ``[T, I, D]``, k ``[T, D]``, w ``[T, I]`` in FP32.

        Args:
            x_TC: input of the attention layer, after its input norm.
            q_latent_TR: query latent, after its RMSNorm.
            positions_T: int64 position of each row in its document.
        """
        dsa = self.dsa
        q_TID = self.linear_wq_b(q_latent_TR).unflatten(-1, (dsa.n_heads, dsa.head_dim))
        k_TD = self.k_norm(self.linear_wk(x_TC))
        q_TID, k_TD = self._rotate(q_TID, k_TD, positions_T, x_TC.dtype)
        gate_TI = self.linear_weights_proj(x_TC)
        scale = (dsa.n_heads * dsa.head_dim) ** -0.5
        return IndexerInputs(q_TID, k_TD, gate_TI.to(compute_dtype(gate_TI)) * scale)

    def _rotate(self, q_TID: Tensor, k_TD: Tensor, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dsa = self.dsa
        fp32 = torch.promote_types(dtype, torch.float32)
        carrier = fp32 if dsa.rope_fp32 else dtype
        cos, sin = self.rotary(positions_T, fp32 if dsa.rope_table_dtype == "fp32" else dtype)
        rotated = []
        for x in (q_TID.to(carrier), k_TD.to(carrier)):
            front, rest = x.split((dsa.qk_pos_emb_head_dim, dsa.head_dim - dsa.qk_pos_emb_head_dim), dim=-1)
            front = apply_rotary_pos_emb(front, cos, sin, dsa.rope_interleaved).to(carrier)
            x = torch.cat((front, rest), dim=-1)
            rotated.append(hadamard_rotate(x) if dsa.rotate_activation else x)
        return rotated[0], rotated[1]
