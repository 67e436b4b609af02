"""DeepSeek Sparse Attention: index, select, attend, and teach the indexer what the attention looked at.

Legend: T rows, S keys, C hidden width, R query-latent width, H heads, D key width, V value width. Queries are absorbed
(MLA as MQA over one latent key head). KL gradients reach only the indexer: its inputs and its target are detached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.spec_utils import build_module

from .backends import resolve
from .backends.protocol import Attended, AttentionInputs, Backend, IndexerInputs, TopK
from .config import DSAConfig
from .context import ForwardContext, refuse_masks, to_token_major
from .context_parallel import RowShards
from .index_share import TopKRecord, remember, remembered
from .loss import attach_loss


@dataclass
class DSAttentionSubmodules:
    """Spec of the indexer, under Megatron's name."""

    indexer: Any = None


class DSAttention(nn.Module):
    """Core attention of an MLA layer; parameters carry Megatron-LM's names.

    ``indexer`` is None on layers that reuse another's selection, and frozen where the loss coefficient is 0 or None.

    Raises:
        ValueError: the configured backend cannot run this configuration on this device.
    """

    # fmt: off
    def __init__(self, config: Any, submodules: DSAttentionSubmodules, layer_number: int,  # noqa: PLR0913
                 attn_mask_type: Any = None, attention_type: Any = None, attention_dropout: float | None = None,
                 softmax_scale: float | None = None, k_channels: int | None = None, v_channels: int | None = None,
                 cp_comm_type: Any = None, pg_collection: Any = None) -> None:
        # fmt: on
        super().__init__()
        refuse_masks(None, None, None, attn_mask_type, attention_dropout or 0.0)
        self.dsa = dsa = DSAConfig.from_transformer_config(config)
        self.layer_number, self.source_layer = layer_number, dsa.source_layer(layer_number)
        backend = resolve(dsa.kernel_backend)
        if reason := backend.unsupported(dsa, torch.device("cuda" if torch.cuda.is_available() else "cpu")):
            raise ValueError(reason)
        self.backend: Backend = backend(dsa)
        self.softmax_scale = softmax_scale or (dsa.qk_head_dim + dsa.qk_pos_emb_head_dim) ** -0.5
        self.shards = RowShards.of(pg_collection, dsa.sequence_parallel)
        self.indexer: nn.Module | None = None
        if self.source_layer == layer_number:
            self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)
            self.indexer.requires_grad_(dsa.loss_enabled)
            self.shards.mark_partial_gradients(self.indexer)
        self.recorder: TopKRecord | None = None
        self.replayed: Mapping[int, TopK] | None = None

    # fmt: off
    def forward(self, query: Tensor, key: Tensor, value: None = None, attention_mask: None = None,  # noqa: PLR0913
                x: Tensor | None = None, qr: Tensor | None = None, attn_mask_type: Any = None,
                attention_bias: None = None, packed_seq_params: Any = None, up_v_weight: Tensor | None = None, *,
                context: ForwardContext | None = None) -> Tensor:
        # fmt: on
        """From absorbed queries ``[T, H, D]`` to latent keys ``[S, D]``, or from ``[s, b, H, D]`` to ``[s, b, 1, D]``.

        The indexer reads ``x`` ``[T, C]``, the layer's input, and ``qr`` ``[T, R]``, the normed query latent.
        ``up_v_weight`` ``[H, v_head_dim, kv_lora_rank]`` projects the output out of the latent. ``context`` is made
        from ``packed_seq_params`` and the shapes where it is None. Returns ``[T, H * V]`` or ``[s, b, H * V]``.
        """
        refuse_masks(value, attention_mask, attention_bias, attn_mask_type)
        rows = to_token_major(query, key, x, qr, self.dsa.kv_lora_rank + self.dsa.qk_pos_emb_head_dim, self.shards.cuts)
        shape = rows.batch or 1, query.shape[0]
        context = context or ForwardContext.build(*shape, packed_seq_params, query.device, cp_group=self.shards.cp)
        trains = self.training and self.dsa.loss_enabled and torch.is_grad_enabled() and self.indexer is not None
        topk, operands = remembered(self, context), None  # no operands: nothing to select or to train
        if self.indexer is not None and (trains or topk is None):
            with torch.set_grad_enabled(trains):
                operands = self.indexer(*self.shards.own_inputs(rows, context))
        kv, operands = self.shards.gather_keys(rows.kv_SD, operands, context)  # kv travels while the indexer scores
        own, topk = self._select(topk, operands, context)
        attention = AttentionInputs(rows.q_THD, kv.wait(), self.softmax_scale)
        out_THV, _ = attended = self.backend.attend(attention, topk, context.layout)
        if trains and operands is not None:
            loss = self._indexer_loss(operands, attention, attended, own, topk, context)
            out_THV = attach_loss(out_THV, loss)
        if up_v_weight is not None:
            out_THV = torch.einsum("thc,hvc->thv", out_THV, up_v_weight)
        return rows.restore(out_THV.flatten(1))

    def _select(self, topk: TopK | None, operands: IndexerInputs | None, context: ForwardContext) -> tuple[TopK, TopK]:
        """The keys of this rank's own rows, with scores where they are selected here, and those of all its rows."""
        if topk is not None:
            return topk.rows(*self.shards.own(context.layout)), remember(self, context, topk)
        assert operands is not None
        own = self.backend.select(operands, self.shards.own_layout(context.layout), self.dsa.topk)
        return own, remember(self, context, self.shards.gather_topk(own))

    # fmt: off
    def _indexer_loss(self, operands: IndexerInputs, attention: AttentionInputs, attended: Attended, own: TopK,
                      topk: TopK, context: ForwardContext) -> Tensor:
        # fmt: on
        """The scaled KL loss of this rank's own rows; the attention's operands are its constant teacher."""
        layout, dense = context.layout, not self.dsa.use_sparse_loss
        own_layout = self.shards.own_layout(layout)
        chunks = self.backend.teacher(attention.detach(), attended.detach(), topk, layout, dense)
        targets = (self.shards.reduce_target(chunk) for chunk in chunks)
        kl_sum = self.backend.indexer_loss(operands, targets, own, own_layout, dense)
        context.losses.record(self.layer_number, kl_sum, own_layout.num_valid_rows)
        return kl_sum * (self.dsa.loss_coeff or 0.0) * context.loss_scale()
