"""Which classes build a GPT: absorbed MLA with DSA or dense core attention, dense or mixture-of-experts layers."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.dense_latent_attention import DenseLatentAttention
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import GroupedMLP, MoELayer, MoESubmodules, TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import RMSNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def get_gpt_decoder_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Specs of all layers and of the final norm.

    Raises:
        ValueError: attention other than MLA, or biases in linear layers.
    """
    if not config.multi_latent_attention:
        raise ValueError(
            "multi_latent_attention is False, but every layer of this package is multi-latent attention: use "
            "MLATransformerConfig (--multi-latent-attention)."
        )
    if config.add_bias_linear:
        raise ValueError(
            "add_bias_linear is True, but the layers of this package have no biases: set it to False "
            "(--disable-bias-linear)."
        )
    layers = [_layer_spec(config, number) for number in range(1, config.num_layers + 1)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, layer_number: int) -> ModuleSpec:
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(config),
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe_spec() if config.is_moe_layer(layer_number) else _mlp_spec(),
        ),
    )


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        MLASelfAttention,
        submodules=MLASelfAttentionSubmodules(
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
            core_attention=_dsa_spec() if config.experimental_attention_variant == "dsa" else DenseLatentAttention,
            linear_proj=RowParallelLinear,
        ),
    )


def _dsa_spec() -> ModuleSpec:
    indexer = DSAIndexerSubmodules(
        linear_wq_b=ReplicatedLinear, linear_wk=ReplicatedLinear, linear_weights_proj=ReplicatedLinear
    )
    return ModuleSpec(DSAttention, submodules=DSAttentionSubmodules(indexer=ModuleSpec(DSAIndexer, submodules=indexer)))


def _mlp_spec() -> ModuleSpec:
    return ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))


def _moe_spec() -> ModuleSpec:
    parts = MoESubmodules(router=TopKRouter, experts=GroupedMLP, shared_experts=_mlp_spec())
    return ModuleSpec(MoELayer, submodules=parts)
