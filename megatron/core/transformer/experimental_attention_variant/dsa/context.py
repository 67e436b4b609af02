"""What one forward pass of one microbatch carries through the layers, as one argument.

Who sees what (layout), where each row stands in its document (positions), the selections that layers share, and the
side losses. It is made at the model's edge, once, and dies with the pass, so that microbatches in flight and activation
recompute cannot read each other's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .collectives import group_rank, group_size
from .index_share import TopKCache
from .layout import Layout, positions, zigzag_key_order
from .loss import LossTracker


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """State of one forward pass.

    Attributes:
        layout: rows, keys and segments of this rank.
        positions_T: int64 position of each row in its document.
        topk_cache: selections shared by layers.
        losses: side losses of this microbatch.
        key_order: int64 order, and its inverse, that sorts keys gathered over context-parallel ranks; None for one.
        valid_rows: rows that are no padding, over all context-parallel ranks; None where ``layout`` is all of them.
    """

    layout: Layout
    positions_T: Tensor
    topk_cache: TopKCache
    losses: LossTracker
    key_order: tuple[Tensor, Tensor] | None = None
    valid_rows: int | None = None

    @classmethod
    def build(
        cls,
        batch: int,
        length: int,
        packed_seq_params: Any,
        device: torch.device | str,
        losses: LossTracker | None = None,
        cp_group: Any = None,
    ) -> ForwardContext:
        """Context of ``[batch, length]`` tokens, or of one packed row (``batch`` must be 1 then).

        With context parallelism ``length`` counts this rank's zigzag rows, and ``packed_seq_params`` describes the
        whole row, which all ranks of ``cp_group`` share. Megatron's own ``PackedSeqParams``, which has no host offsets,
        is read from the device.

        Raises:
            ValueError: the packed offsets do not cover the row, or do not split over ``cp_group``.
        """
        cp_size = group_size(cp_group)
        if packed_seq_params is None:
            offsets = padded = tuple(i * length * cp_size for i in range(batch + 1))
        else:
            offsets, padded = _offsets(packed_seq_params)
        layout = Layout.zigzag(offsets, cp_size, group_rank(cp_group), padded)
        if layout.num_rows != batch * length or (packed_seq_params is not None and batch != 1):
            raise ValueError(
                f"packed_seq_params describes one row of {layout.num_rows} tokens, but the input is [{batch}, "
                f"{length}]: flatten the batch into one packed row, and let the offsets reach its end."
            )
        key_order = zigzag_key_order(padded, cp_size, device)
        tracker = losses or LossTracker()
        return cls(layout, positions(layout, device), TopKCache(), tracker, key_order, offsets[-1])

    def loss_scale(self) -> float | Tensor:
        """Factor on a KL sum of this rank's rows, without the coefficient."""
        return self.losses.scale(self.layout.num_valid_rows if self.valid_rows is None else self.valid_rows)


def _offsets(packed: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Real and padded cumulative lengths of the documents in one packed row."""
    if getattr(packed, "offsets", None) is not None:
        return packed.offsets, packed.padded_offsets or packed.offsets
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    offsets = tuple(real.tolist())
    return offsets, offsets if padded is None else tuple(padded.tolist())


class TokenMajor(NamedTuple):
    """``DSAttention``'s operands, token-major, and the batch size to give its output back in."""

    q_THD: Tensor
    kv_SD: Tensor
    x_TC: Tensor
    q_latent_TR: Tensor
    batch: int | None

    def restore(self, out_TC: Tensor) -> Tensor:
        """The output in the layout that the query came in: ``[T, C]``, or Megatron's ``[s, b, C]``."""
        return out_TC if self.batch is None else out_TC.unflatten(0, (self.batch, -1)).transpose(0, 1)


def refuse_masks(value: Any, mask: Any, bias: Any, mask_type: Any, dropout: float = 0.0) -> None:
    """Refuse what a layout cannot say, instead of ignoring it.

    Raises:
        ValueError: values beside the latent keys, a mask, a bias, a mask type that is not causal, or dropout.
    """
    if value is not None or mask is not None or bias is not None:
        raise ValueError(
            "DSAttention got a value, an attention_mask or an attention_bias, but it takes latent keys and causal "
            "documents alone: pass None for the three, and describe documents by packed_seq_params."
        )
    name = getattr(mask_type, "name", mask_type)
    if name not in (None, "causal", "padding_causal"):
        raise ValueError(
            f"attn_mask_type={name} was given, but DSA is causal within each document: use causal or padding_causal."
        )
    if dropout:
        raise ValueError(f"attention_dropout={dropout} was given, but the sparse kernels have none: set it to 0.")


def refuse_autocast(device: torch.device) -> None:
    """Refuse to compute where PyTorch would round what is FP32 by contract.

    Raises:
        ValueError: ``torch.autocast`` is on for ``device``.
    """
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"torch.autocast({torch.get_autocast_dtype(device.type)}) is on, but it would round index scores and "
            "routers, which are FP32 in every precision: leave it, and build the model with bf16=True."
        )


def to_token_major(
    query: Tensor, key: Tensor, x: Tensor | None, qr: Tensor | None, width: int, shards: int = 1
) -> TokenMajor:
    """Megatron's ``[s, b, ...]`` as batch-major rows (a view where ``b`` is 1); token-major operands as they are.

    Args:
        query, key, x, qr: operands of ``DSAttention``.
        width: channels of a query head and of a key.
        shards: ranks that sequence parallelism shares the rows of ``key``, ``x`` and ``qr`` out to.

    Raises:
        ValueError: the indexer's inputs are missing, operands are of other rows than the queries or of another width,
            or sequence parallelism cut ``[s, b, ...]`` into rows that do not follow one another.
    """
    refuse_autocast(query.device)
    if x is None or qr is None:
        raise ValueError(
            "DSAttention got no x or no qr, but its indexer reads both: pass the layer's input and the "
            "normed query latent."
        )
    if query.dim() == 4 and query.shape[1] > 1 and shards > 1:
        raise ValueError(
            f"DSAttention got {query.shape[1]} sequences under sequence parallelism, which cuts rows across sequences: "
            "use a micro-batch of 1, or one packed row."
        )
    lead = query.dim() - 2
    rows = (query.shape[0] // shards, *query.shape[1:lead])
    for name, operand in (("key", key), ("x", x), ("qr", qr)):
        if operand.shape[:lead] != rows:
            raise ValueError(
                f"DSAttention got queries {list(query.shape)} and {name} {list(operand.shape)}, but every token brings "
                f"its own row of each (here {list(rows)}): pass all operands of the same tokens; keys of earlier calls "
                "(generation) are not supported."
            )
    if query.shape[-1] != width or key.shape[-1] != width:
        raise ValueError(
            f"DSAttention got query heads of {query.shape[-1]} and keys of {key.shape[-1]} channels, but both have "
            f"kv_lora_rank + qk_pos_emb_head_dim = {width}: absorb the key projection into the queries."
        )
    if query.dim() == 3:
        return TokenMajor(query, _rows(key), _rows(x), _rows(qr), None)
    return TokenMajor(query.transpose(0, 1).flatten(0, 1), _rows(key), _rows(x), _rows(qr), query.shape[1])


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(2).transpose(0, 1).flatten(0, 1)
