"""From a configuration to a model."""

from __future__ import annotations

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig


def build_gpt_model(
    config: TransformerConfig,
    device: torch.device | str | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """The model of ``config``, in ``config.params_dtype``.

    Args:
        config: ``vocab_size`` must be set.
        device: where parameters are made; the default device when None. On "meta" nothing is allocated: materialize
            with ``to_empty``, then call ``initialize_weights`` or load a checkpoint.
        pg_collection: process groups; None in one process.
    """
    with torch.device(torch.get_default_device() if device is None else device):
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings or 0,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            pg_collection=pg_collection,
        )
