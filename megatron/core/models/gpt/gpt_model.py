"""The GPT model: embedding, decoder, output layer, and the loss of next-token prediction.

Everything between the token ids and the loss is token-major ``[T, ...]``: a ``[b, s]`` batch is flattened batch-major
and is ``b`` documents of the layout, a packed row (``[1, T]`` with ``packed_seq_params``) one document a sequence. The
``ForwardContext`` made here is the one argument that all layers share.

The vocabulary is padded to a multiple of ``make_vocab_size_divisible_by``, whatever the parallelism. Padded entries are
never tokens: they are cut from logits and take no part in the loss, so their rows get no gradient.

Over context-parallel ranks each takes its zigzag rows of tokens and labels (``training/data/shard.py`` cuts them), over
tensor-parallel ranks all take the same; with sequence parallelism rows are shared out from behind the embedding up to
the output layer. Losses come back for this rank's tokens, on every tensor-parallel rank.

Left out: pipeline stages (``pre_process``, ``post_process``), refused in one sentence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import chunked_cross_entropy, rows_in_budget
from megatron.core.tensor_parallel.initialization import initialize_weights
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, parallel_input
from megatron.core.tensor_parallel.mappings import gather_rows, group_rank, group_size, slice_rows
from megatron.core.tensor_parallel.shards import local_part
from megatron.core.transformer.experimental_attention_variant.dsa.context import refuse_autocast
from megatron.core.transformer.experimental_attention_variant.dsa.loss import LossTracker
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(MegatronModule):
    """A decoder-only language model.

    Args:
        config: of the model.
        transformer_layer_spec: what ``get_gpt_decoder_block_spec`` returns.
        vocab_size: rows of the embedding table; those past ``config.vocab_size`` (if set) are padding.
        max_sequence_length: longest document the model is meant for; rotary embeddings set no limit.
        share_embeddings_and_output_weights: use the embedding table as the output weight.
        pre_process, post_process: must be True.
        pg_collection: process groups; None in one process.

    Weights are initialized from ``torch.initial_seed()`` and each module's name; on the meta device they are not.

    Raises:
        ValueError: one sentence for what is not supported.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        share_embeddings_and_output_weights: bool = False,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection or ProcessGroupCollection()
        _check_groups(config, self.groups, pre_process, post_process)
        self.vocab_size = config.vocab_size or vocab_size
        self.max_sequence_length = max_sequence_length
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.embedding = LanguageModelEmbedding(config, vocab_size, pg_collection)
        self.decoder = TransformerBlock(config, transformer_layer_spec, pg_collection)
        if not share_embeddings_and_output_weights:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, vocab_size, config=config, tp_group=self.groups.tp
            )
        initialize_weights(self)

    def forward(  # noqa: PLR0913
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        losses: LossTracker | None = None,
    ) -> Tensor:
        """Logits, or the loss of each token.

        Args:
            input_ids: int64 ``[b, s]``; ``[1, T]`` with ``packed_seq_params``; own rows of it with context parallelism.
            position_ids, attention_mask: must be None; both follow from the documents.
            decoder_input: ``[b, s, hidden]``, used in place of the embedded tokens.
            labels: int64 ``[b, s]``, the next token; -100 gives a loss of 0.
            loss_mask: ``[b, s]``, multiplies the loss.
            packed_seq_params: documents of the whole packed row, and its padding.
            losses: side losses of this microbatch: their scale, and what they came to.

        Returns:
            Without labels logits ``[b, s, vocab]`` in the model's type, else the loss in FP32 ``[b, s]``.
        """
        tokens = _check_inputs(position_ids, attention_mask, input_ids, decoder_input)
        batch, length = tokens.shape[:2]
        _check_targets(labels, loss_mask, (batch, length))
        tp_group = self.groups.tp
        context = ForwardContext.build(batch, length, packed_seq_params, tokens.device, losses, cp_group=self.groups.cp)
        hidden = self.embedding(tokens) if decoder_input is None else self._own_rows(tokens.flatten(0, 1))
        hidden = parallel_input(self.decoder(hidden, context), self.config, tp_group)
        if labels is None:
            columns = gather_rows(self.logits(hidden).T, tp_group, grad="slice").T
            return columns[:, : self.vocab_size].unflatten(0, (batch, length))
        rows = rows_in_budget(-(-self.vocab_size // group_size(tp_group)))
        loss = chunked_cross_entropy(hidden, labels.flatten(), self.logits, rows, tp_group)
        loss = loss.unflatten(0, (batch, length)).clone()  # no view: FSDP hangs its hooks on what leaves a module
        return loss if loss_mask is None else loss * loss_mask

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, hidden]``, after the final norm -> ``[T, vocab]``, without the vocabulary's padding.

        Of a shared-out vocabulary these are own columns, equally many on each rank, and padding is -inf.
        """
        if self.share_embeddings_and_output_weights:
            logits = F.linear(hidden, local_part(self.embedding.word_embeddings.weight))
        else:
            logits = self.output_layer(hidden)
        if group_size(self.groups.tp) == 1:
            return logits[:, : self.vocab_size]
        columns = logits.shape[1]
        first = group_rank(self.groups.tp) * columns
        return logits.masked_fill(
            torch.arange(first, first + columns, device=logits.device) >= self.vocab_size, -torch.inf
        )

    def _own_rows(self, hidden: Tensor) -> Tensor:
        return slice_rows(hidden, self.groups.tp) if self.config.sequence_parallel else hidden


def _check_groups(
    config: TransformerConfig, groups: ProcessGroupCollection, pre_process: bool, post_process: bool
) -> None:
    if not (pre_process and post_process):
        raise ValueError(
            f"pre_process={pre_process} and post_process={post_process} ask for a pipeline stage, but models are whole "
            "here: leave both True."
        )
    sizes = {"tensor_model_parallel": groups.tp, "context_parallel": groups.cp, "expert_model_parallel": groups.ep}
    for name, group in sizes.items():
        asked = getattr(config, f"{name}_size")
        if asked != group_size(group):
            raise ValueError(
                f"{name}_size={asked} was given, but the model's process group for it has {group_size(group)} ranks: "
                f"pass pg_collection with a group of {asked}, or set it to {group_size(group)}."
            )


def _check_inputs(
    position_ids: Tensor | None, attention_mask: Tensor | None, input_ids: Tensor | None, decoder_input: Tensor | None
) -> Tensor:
    """What the model reads: token ids, or hidden states in their place."""
    for name, given in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if given is not None:
            raise ValueError(
                f"{name} was given, but positions and masks follow from the documents: pass None, and describe "
                "documents and padding by packed_seq_params."
            )
    if (input_ids is None) == (decoder_input is None):
        raise ValueError("The model needs one input: give either input_ids or decoder_input.")
    tokens, dims = (input_ids, 2) if decoder_input is None else (decoder_input, 3)
    assert tokens is not None
    if tokens.dim() != dims:
        raise ValueError(
            f"The model's input is {list(tokens.shape)}, but it takes token ids [b, s] (or decoder_input [b, s, "
            "hidden]): add the batch dimension."
        )
    refuse_autocast(tokens.device)
    return tokens


def _check_targets(labels: Tensor | None, loss_mask: Tensor | None, shape: tuple[int, int]) -> None:
    for name, given in (("labels", labels), ("loss_mask", loss_mask)):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} is {list(given.shape)}, but the input is {list(shape)}: give one entry for each token, in the "
                "same layout."
            )
