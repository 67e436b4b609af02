"""DeepSeek Sparse Attention: index, select, attend, and teach the indexer what the attention looked at.

Legend: T rows, S keys, C hidden width, R query-latent width, H heads, D key width, V value width.
Queries are absorbed (MLA as MQA over one latent key head). Gradients of the KL loss reach only the indexer: its inputs
and its target are detached. Token-major inside; Megatron-LM's ``[s, b, h, d]`` is converted once at each end.
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
from .index_share import recorded_rows
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
        self.indexer: nn.Module | None = None
        if self.source_layer == layer_number:
            self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)
            self.indexer.requires_grad_(dsa.loss_enabled)
        self.recorder: dict[int, TopK] | None = None
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
        rows = to_token_major(query, key, x, qr)
        context = context or ForwardContext.build(rows.batch or 1, query.shape[0], packed_seq_params, query.device)
        attention = AttentionInputs(rows.q_THD, rows.kv_SD, self.softmax_scale)
        topk, indexer = self._select(rows.x_TC, rows.q_latent_TR, context)
        attended = self.backend.attend(attention, topk, context.layout)
        out_THV = attended.out_THV
        if indexer is not None:
            out_THV = attach_loss(out_THV, self._indexer_loss(indexer, attention, attended, topk, context))
        if up_v_weight is not None:
            out_THV = torch.einsum("thc,hvc->thv", out_THV, up_v_weight)
        return rows.restore(out_THV.flatten(1))

    def _select(self, x_TC: Tensor, qr_TR: Tensor, context: ForwardContext) -> tuple[TopK, IndexerInputs | None]:
        """This layer's keys, and the indexer's operands where they are to be trained."""
        if self.indexer is None:
            return context.topk_cache.require(self.source_layer, self.layer_number), None
        trains = self.training and self.dsa.loss_enabled and torch.is_grad_enabled()
        topk = kept = context.topk_cache.get(self.layer_number)  # recompute finds what its own pass selected
        if topk is None and self.replayed is not None:
            topk = recorded_rows(self.replayed, self.layer_number, context.layout)
        if trains or topk is None:
            with torch.set_grad_enabled(trains):
                operands: IndexerInputs = self.indexer(x_TC.detach(), qr_TR.detach(), context.positions_T)
        if topk is None:
            topk = self.backend.select(operands, context.layout, self.dsa.topk)
        if kept is None:
            context.topk_cache.put(self.layer_number, topk)
            if self.recorder is not None:
                self.recorder[self.layer_number] = topk._replace(scores_TK=None)
        return (topk, operands) if trains else (topk._replace(scores_TK=None), None)

    # fmt: off
    def _indexer_loss(self, indexer: IndexerInputs, attention: AttentionInputs, attended: Attended, topk: TopK,
                      context: ForwardContext) -> Tensor:
        # fmt: on
        """The scaled KL loss of this rank's rows; the attention's operands are its constant teacher."""
        layout, dense, kl_sum = context.layout, not self.dsa.use_sparse_loss, indexer.w_TI.new_zeros(())
        frozen = AttentionInputs(attention.q_THD.detach(), attention.kv_SD.detach(), attention.scale)
        for chunk in self.backend.teacher(frozen, Attended(*(t.detach() for t in attended)), topk, layout, dense):
            part = (indexer.rows(*chunk.rows), chunk, topk.rows(*chunk.rows), layout.slice_rows(*chunk.rows), dense)
            kl_sum = kl_sum + self.backend.indexer_loss(*part)
        context.losses.record(self.layer_number, kl_sum, layout.num_valid_rows)
        return kl_sum * (self.dsa.loss_coeff or 0.0) * context.losses.scale(layout.num_valid_rows)
