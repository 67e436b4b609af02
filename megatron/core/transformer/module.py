"""Base class of the modules that a configuration shapes."""

from __future__ import annotations

from torch import nn

from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(nn.Module):
    """A module that knows its configuration."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
