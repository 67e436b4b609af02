"""Mixture of experts: router, routed and shared experts, load balancing."""

from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter, update_expert_bias

__all__ = ["GroupedMLP", "MoELayer", "MoESubmodules", "TopKRouter", "update_expert_bias"]
