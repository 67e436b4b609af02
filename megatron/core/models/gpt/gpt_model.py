"""The GPT model: embedding, decoder, output layer, and the loss of next-token prediction.

Everything between the token ids and the loss is token-major ``[T, ...]``: a ``[b, s]`` batch is flattened batch-major
and is ``b`` documents of the layout, a packed row (``[1, T]`` with ``packed_seq_params``) one document a sequence. The
``ForwardContext`` made here is the one argument that all layers share.

The vocabulary is padded to a multiple of ``make_vocab_size_divisible_by``, whatever the parallelism. Padded entries are
never tokens: they are cut from logits and take no part in the loss, so their rows get no gradient.

Left out: pipeline stages (``pre_process``, ``post_process``) and tensor, context and expert parallelism, each refused
in one sentence.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import chunked_cross_entropy, rows_in_budget
from megatron.core.tensor_parallel.initialization import initialize_weights
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
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
        _check_one_process(config, pre_process, post_process)
        self.vocab_size = config.vocab_size or vocab_size
        self.max_sequence_length = max_sequence_length
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.embedding = LanguageModelEmbedding(config, vocab_size, pg_collection)
        self.decoder = TransformerBlock(config, transformer_layer_spec, pg_collection)
        if not share_embeddings_and_output_weights:
            tp_group = None if pg_collection is None else pg_collection.tp
            self.output_layer = ColumnParallelLinear(config.hidden_size, vocab_size, config=config, tp_group=tp_group)
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
            input_ids: int64 ``[b, s]``; ``[1, T]`` with ``packed_seq_params``.
            position_ids, attention_mask: must be None; both follow from the documents.
            decoder_input: ``[b, s, hidden]``, used in place of the embedded tokens.
            labels: int64 ``[b, s]``, the next token; -100 gives a loss of 0.
            loss_mask: ``[b, s]``, multiplies the loss.
            packed_seq_params: documents of a packed row, and its padding.
            losses: side losses of this microbatch: their scale, and what they came to.

        Returns:
            Without labels logits ``[b, s, vocab]`` in the model's type, else the loss in FP32 ``[b, s]``.
        """
        _check_inputs(position_ids, attention_mask, input_ids, decoder_input)
        tokens = input_ids if decoder_input is None else decoder_input
        assert tokens is not None
        batch, length = tokens.shape[:2]
        context = ForwardContext.build(batch, length, packed_seq_params, tokens.device, losses)
        hidden = self.embedding(tokens) if decoder_input is None else tokens.flatten(0, 1)
        hidden = self.decoder(hidden, context)
        if labels is None:
            return self.logits(hidden).unflatten(0, (batch, length))
        loss = chunked_cross_entropy(hidden, labels.flatten(), self.logits, rows_in_budget(self.vocab_size))
        loss = loss.unflatten(0, (batch, length))
        return loss if loss_mask is None else loss * loss_mask

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, hidden]``, after the final norm -> ``[T, vocab]``, without the vocabulary's padding."""
        if self.share_embeddings_and_output_weights:
            logits = F.linear(hidden, self.embedding.word_embeddings.weight)
        else:
            logits = self.output_layer(hidden)
        return logits[:, : self.vocab_size]


def _check_one_process(config: TransformerConfig, pre_process: bool, post_process: bool) -> None:
    if not (pre_process and post_process):
        raise ValueError(
            f"pre_process={pre_process} and post_process={post_process} ask for a pipeline stage, but models are whole "
            "here: leave both True."
        )
    for name in ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        if getattr(config, name) > 1:
            raise ValueError(
                f"{name}={getattr(config, name)} was given, but the model runs in one process: set it to 1."
            )


def _check_inputs(
    position_ids: Tensor | None, attention_mask: Tensor | None, input_ids: Tensor | None, decoder_input: Tensor | None
) -> None:
    for name, given in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if given is not None:
            raise ValueError(
                f"{name} was given, but positions and masks follow from the documents: pass None, and describe "
                "documents and padding by packed_seq_params."
            )
    if (input_ids is None) == (decoder_input is None):
        raise ValueError("The model needs one input: give either input_ids or decoder_input.")
