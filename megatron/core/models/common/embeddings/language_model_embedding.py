"""Token embedding of a language model, token-major."""

from __future__ import annotations

from torch import Tensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """Looks tokens up; positions enter by rotary embedding, inside the layers.

    Args:
        config: of the model.
        vocab_size: rows of the table, padding included.
        pg_collection: process groups; None in one process.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config)
        tp_group = None if pg_collection is None else pg_collection.tp
        self.word_embeddings = VocabParallelEmbedding(vocab_size, config.hidden_size, config=config, tp_group=tp_group)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[b, s]`` tokens -> ``[b * s, hidden]``, batch-major; own rows of it with sequence parallelism."""
        return self.word_embeddings(input_ids.flatten())
