"""The GPT model: build it with ``build_gpt_model``, from a preset or a configuration."""

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.presets import PRESETS, get_preset

__all__ = ["PRESETS", "GPTModel", "build_gpt_model", "get_gpt_decoder_block_spec", "get_preset"]
