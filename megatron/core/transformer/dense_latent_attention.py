"""Dense causal attention over latent keys: the core attention of MLA where no sparse variant is chosen.

The baseline that DSA is compared with, and plain on purpose: one ``scaled_dot_product_attention`` for each segment of
the layout, so that documents never see each other. It has the interface of ``DSAttention`` and ignores what only an
indexer reads. Tensor-parallel ranks hold other heads; keys are gathered over ranks as DSA's are.

Legend: T rows, S keys, H heads, D key width, L kv_lora_rank, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa.context_parallel import RowShards
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Segment
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig


class DenseLatentAttention(MegatronModule):
    """Causal attention of absorbed queries to every earlier latent key of their document."""

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        softmax_scale: float,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.shards = RowShards.of(pg_collection, config.sequence_parallel)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        up_v_weight: Tensor,
        context: ForwardContext,
        x: Tensor | None = None,
        qr: Tensor | None = None,
    ) -> Tensor:
        """Attend from absorbed queries to latent keys.

        Args:
            query: ``[T, H, D]``.
            key: ``[S, D]``; values are its first ``kv_lora_rank`` channels.
            up_v_weight: ``[H, V, L]``.
            context: gives the layout.
            x, qr: what an indexer would read; not used.

        Returns:
            ``[T, H * V]``, zero on padding rows.
        """
        latent = self.config.kv_lora_rank
        key = self.shards.gather_keys(key, None, context)[0].wait()
        pieces, row = [], 0
        for segment in context.layout.segments:
            pieces.append(query.new_zeros(segment.row_start - row, query.shape[1], latent))
            pieces.append(self._attend(query, key, segment))
            row = segment.row_stop
        pieces.append(query.new_zeros(query.shape[0] - row, query.shape[1], latent))
        return torch.einsum("thl,hvl->thv", torch.cat(pieces), up_v_weight).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, segment: Segment) -> Tensor:
        q_HTD = query[segment.row_start : segment.row_stop].transpose(0, 1)
        k_HSD = key[segment.key_start : segment.key_stop].expand(query.shape[1], -1, -1)
        v_HSL = k_HSD[..., : self.config.kv_lora_rank]
        causal = segment.causal_offset == 0
        rows, keys = q_HTD.shape[1], k_HSD.shape[1]
        mask = None
        if not causal:
            mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(segment.causal_offset)
        out_HTL = F.scaled_dot_product_attention(
            q_HTD[None], k_HSD[None], v_HSL[None], attn_mask=mask, is_causal=causal, scale=self.softmax_scale
        )[0]
        return out_HTL.transpose(0, 1)
