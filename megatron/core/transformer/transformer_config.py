"""The model configuration: flat fields under Megatron-LM's names.

One dataclass describes a model and how it is sharded; the command line is generated from it, so every field carries
its docstring. Defaults are Megatron's. Two things are left out on purpose: options of runtimes that this package does
not have (pipeline stages, Transformer Engine recipes), and any check of a DSA option: all of those live in
``dsa/config.py`` (``DSAConfig``), which this class builds once so that a bad combination fails at construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

_NEVER_NEGATIVE = (
    "layernorm_epsilon",
    "attention_latent_norm_epsilon",
    "init_method_std",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
)


@dataclass
class TransformerConfig:
    """A decoder-only transformer.

    Raises:
        ValueError: one sentence that names the option, its value, what is supported and what to change.
    """

    # ---- architecture ----
    num_layers: int = 0
    """Number of transformer layers."""
    hidden_size: int = 0
    """Width of the residual stream."""
    num_attention_heads: int = 0
    """Number of attention heads (before tensor parallelism)."""
    ffn_hidden_size: int | None = None
    """Width of the dense layers' MLP; 4 * hidden_size when unset."""
    vocab_size: int | None = None
    """Number of tokens of the vocabulary before padding; taken from the tokenizer when unset."""
    make_vocab_size_divisible_by: int = 128
    """The embedding table is padded to a multiple of this; the padding does not depend on tensor parallelism."""
    max_position_embeddings: int | None = None
    """Longest position the model is meant for; no numeric effect with rotary embeddings."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight instead of sharing the embedding's."""
    normalization: Literal["RMSNorm"] = "RMSNorm"
    """Normalization of the residual stream; RMSNorm is the one this package has."""
    layernorm_epsilon: float = 1e-5
    """Epsilon of the block norms and of the final norm."""
    layernorm_zero_centered_gamma: bool = False
    """Store norm weights as offsets from 1."""
    add_bias_linear: bool = True
    """Biases in linear layers; DSA models have none, so pass --disable-bias-linear."""
    gated_linear_unit: bool = False
    """Gate the MLP; with activation_func silu this is SwiGLU (--swiglu sets both)."""
    activation_func: str | Callable[..., Any] = "gelu"
    """Activation of the MLP: "silu" (or torch.nn.functional.silu); SwiGLU is the one MLP this package has."""
    hidden_dropout: float = 0.0
    """Dropout of the residual stream; only 0 is supported."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities; only 0 is supported (the sparse kernels have none)."""
    init_method_std: float = 0.02
    """Standard deviation of the normal initialization; output projections divide it by sqrt(2 * num_layers)."""

    # ---- mixture of experts ----
    num_moe_experts: int | None = None
    """Number of routed experts; None builds dense layers only."""
    moe_layer_freq: int | list[int] = 1
    """Which layers are MoE: one of every N, or a list of 0 (dense) and 1 (MoE) with one entry a layer."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; ffn_hidden_size when unset."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts; None builds none."""
    moe_shared_expert_overlap: bool = False
    """Run the shared experts while rows travel to the experts of other ranks; no effect without expert parallelism."""
    moe_router_topk: int = 2
    """Experts a token is routed to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    moe_router_enable_expert_bias: bool = False
    """Balance the load with a bias on the choice of experts (DeepSeek-V3), updated after each optimizer step."""
    moe_router_bias_update_rate: float = 1e-3
    """Step of the expert bias update."""
    moe_router_num_groups: int | None = None
    """Split the experts into this many groups and keep the best ones."""
    moe_router_group_topk: int | None = None
    """Groups kept for a token."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the routed experts' weights."""
    norm_topk_prob: bool = True
    """Renormalize the chosen experts' weights to sum to 1."""
    moe_router_dtype: Literal["fp32"] = "fp32"
    """Precision of the router's product and scores."""
    moe_router_load_balancing_type: Literal["none", "seq_aux_loss"] = "none"
    """Auxiliary balancing loss: none, or DeepSeek-V3's loss per sequence."""
    moe_aux_loss_coeff: float = 0.0
    """Coefficient of the auxiliary balancing loss."""

    # ---- attention variant ----
    multi_latent_attention: bool = False
    """Multi-latent attention (use MLATransformerConfig)."""
    experimental_attention_variant: Literal["dsa"] | None = None
    """"dsa" selects DeepSeek Sparse Attention; None selects dense attention."""
    dsa_indexer_n_heads: int | None = None
    """Heads of the lightning indexer (GLM-5: 32, DeepSeek-V3.2: 64)."""
    dsa_indexer_head_dim: int | None = None
    """Width of an indexer head (128 in released models)."""
    dsa_indexer_topk: int | None = None
    """Keys that each row selects (2048 in released models)."""
    dsa_indexer_topk_freq: int | list[int] = 1
    """IndexShare: one of every N layers selects, the others reuse its keys; or a list of 1 (selects) and 0 (reuses)."""
    dsa_indexer_skip_topk_offset: int = 0
    """IndexShare: the first layers, up to this number, all select."""
    dsa_indexer_loss_coeff: float | None = None
    """Coefficient of the indexer's KL loss; None or 0 freezes the indexer."""
    dsa_indexer_use_sparse_loss: bool = False
    """KL loss over the selected keys only (sparse stage) instead of over all visible keys (dense warm-up)."""
    dsa_indexer_rope_interleaved: bool = False
    """Rotary pairs of the indexer: neighbours (GLM-5) instead of halves (DeepSeek-V3.2)."""
    dsa_indexer_rotate_activation: bool = True
    """Hadamard-rotate indexer queries and keys before scoring."""
    dsa_indexer_scoring_relu: bool = True
    """ReLU on each head's score, as in every released model."""
    dsa_indexer_k_norm_epsilon: float | None = None
    """Epsilon of the indexer's key LayerNorm; layernorm_epsilon when unset (released models: 1e-6)."""
    dsa_indexer_k_norm_fp32: bool = False
    """Keep the key LayerNorm's parameters in FP32; its arithmetic always is."""
    dsa_indexer_rope_fp32: bool = False
    """Keep indexer queries and keys in FP32 from the key LayerNorm through RoPE up to the scoring boundary."""
    dsa_indexer_rope_table_dtype: Literal["model", "fp32"] = "model"
    """Precision of the indexer's cos/sin tables."""
    dsa_indexer_scoring_precision: Literal["bf16", "fp8", "fp32"] = "bf16"
    """What indexer queries and keys are rounded to when they are scored; fp32 rounds nothing (reference backend)."""
    dsa_indexer_fp8_scale_format: Literal["ue8m0", "fp32", "fp32_k"] = "ue8m0"
    """Scales of FP8 scoring: powers of two, plain FP32 (SGLang's GLM path), or plain for keys (its DeepSeek path)."""
    dsa_indexer_fp8_check_finite: bool = False
    """Stop where an indexer query or key of FP8 scoring is NaN or infinite; waits for the device in every layer."""
    dsa_match_engine: Literal["vllm", "sglang", "lmdeploy", "deepseek"] | None = None
    """Set what is needed to select the keys that an inference engine selects in FP8 (docs/rl_parity.md)."""
    dsa_kernel_backend: str = "none"
    """Kernels of DSA: "none" (plain PyTorch, runs anywhere) or "cudnn" (cuDNN Frontend and FlashMLA, Hopper)."""

    # ---- training ----
    calculate_per_token_loss: bool = False
    """Normalize losses by the tokens of the global batch instead of per microbatch."""
    recompute_granularity: Literal["full"] | None = None
    """"full" recomputes each layer's activations in backward."""
    deterministic_mode: bool = False
    """Refuse, before the first step, what cannot be reproduced bit for bit."""
    params_dtype: torch.dtype = torch.float32
    """Data type of the parameters while computing."""
    bf16: bool = False
    """Compute in BF16."""

    # ---- parallelism ----
    tensor_model_parallel_size: int = 1
    """Ranks that share one layer's weights."""
    context_parallel_size: int = 1
    """Ranks that share one sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that share a layer's experts."""
    sequence_parallel: bool = False
    """Shard rows outside attention and MLP over the tensor-parallel ranks."""
    cp_comm_type: str = "p2p"
    """How context parallelism moves keys; this package has "allgather"."""

    def __post_init__(self) -> None:
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.num_moe_experts is not None and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        if self.bf16:
            self.params_dtype = torch.bfloat16
        self._check_block()
        self._check_numbers()
        self._check_moe()
        self._check_balance()
        self._check_shared_experts()
        if self.experimental_attention_variant == "dsa":
            self.dsa_config()  # raises on any option that does not fit

    def dsa_config(self) -> Any:
        """The checked DSA options (``DSAConfig``) of this model."""
        from megatron.core.transformer.experimental_attention_variant.dsa.config import DSAConfig

        return DSAConfig.from_transformer_config(self)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is unset: set it, or take it from the tokenizer before building the model.")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    def is_moe_layer(self, layer_number: int) -> bool:
        """Whether layer ``layer_number`` (1-based) has experts."""
        if self.num_moe_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return (layer_number - 1) % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer_number - 1])

    def computes_in_fp32(self, name: str) -> bool:
        """Whether the model's tensor ``name`` is FP32 whatever the model computes in.

        The routers' are, and with ``dsa_indexer_k_norm_fp32`` the indexers' key norms.
        """
        suffixes = [".router.weight", ".router.expert_bias"]
        if self.dsa_indexer_k_norm_fp32:
            suffixes += [".indexer.k_norm.weight", ".indexer.k_norm.bias"]
        return name.endswith(tuple(suffixes))

    def _check_block(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "make_vocab_size_divisible_by",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to a positive number.")
        if self.hidden_dropout != 0 or self.attention_dropout != 0:
            raise ValueError(
                f"hidden_dropout={self.hidden_dropout} and attention_dropout={self.attention_dropout} were given, "
                "but this package trains without dropout: set both to 0."
            )
        self.activation_func = getattr(self.activation_func, "__name__", self.activation_func)
        if not self.gated_linear_unit or self.activation_func != "silu":
            raise ValueError(
                f"The MLP is gated_linear_unit={self.gated_linear_unit} with activation_func="
                f"{self.activation_func!r}, but this package has SwiGLU only: pass --swiglu "
                '(gated_linear_unit=True, activation_func="silu").'
            )

    def _check_numbers(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value) and not name.startswith("dsa_"):
                raise ValueError(f"{name} is {value}: set it to a finite number.")
            if name in _NEVER_NEGATIVE and value is not None and value < 0:
                raise ValueError(f"{name} is {value}: set it to 0 or a positive number.")

    def _check_moe(self) -> None:
        if self.num_moe_experts is None:
            return
        for name in (
            "num_moe_experts",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: set it to a positive number.")
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk={self.moe_router_topk} exceeds num_moe_experts={self.num_moe_experts}: "
                "lower it to at most the number of experts."
            )
        freq = self.moe_layer_freq
        if not isinstance(freq, int) and len(freq) != self.num_layers:
            raise ValueError(f"moe_layer_freq has {len(freq)} entries for {self.num_layers} layers: give one a layer.")
        if not isinstance(freq, int) and set(freq) - {0, 1}:
            raise ValueError(f"moe_layer_freq={list(freq)} has entries other than 0 (dense) and 1 (MoE): use these.")
        if isinstance(freq, int) and freq < 1:
            raise ValueError(f"moe_layer_freq={freq} is not a positive interval: use 1 or more, or a list of 0 and 1.")
        self._check_expert_groups()

    def _check_balance(self) -> None:
        if self.moe_aux_loss_coeff and self.moe_router_load_balancing_type == "none":
            raise ValueError(
                f"moe_aux_loss_coeff={self.moe_aux_loss_coeff} was given, but moe_router_load_balancing_type='none' "
                "has no balancing loss: set it to 'seq_aux_loss', or the coefficient to 0."
            )

    def _check_shared_experts(self) -> None:
        if self.moe_shared_expert_overlap and not (self.num_moe_experts and self.moe_shared_expert_intermediate_size):
            raise ValueError(
                f"moe_shared_expert_overlap=True needs shared experts to run, but num_moe_experts is "
                f"{self.num_moe_experts} and moe_shared_expert_intermediate_size is "
                f"{self.moe_shared_expert_intermediate_size}: set both, or drop the overlap."
            )

    def _check_expert_groups(self) -> None:
        groups, kept = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (kept is None):
            raise ValueError(
                f"moe_router_num_groups={groups} and moe_router_group_topk={kept}: set both, or neither for no groups."
            )
        if groups is None or kept is None or self.num_moe_experts is None:
            return
        if groups < 1 or self.num_moe_experts % groups or self.num_moe_experts // groups < 2 or not 1 <= kept <= groups:
            raise ValueError(
                f"{self.num_moe_experts} experts in moe_router_num_groups={groups} groups, of which "
                f"moe_router_group_topk={kept} are kept: groups must divide the experts, hold at least 2 each, and at "
                "least one but no more than all can be kept."
            )
        if kept * (self.num_moe_experts // groups) < self.moe_router_topk:
            raise ValueError(
                f"The {kept} groups kept hold {kept * (self.num_moe_experts // groups)} experts, fewer than "
                f"moe_router_topk={self.moe_router_topk}: keep more groups or route to fewer experts."
            )


_ROTARY_NUMBERS = (
    "rotary_base",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)


@dataclass
class MLATransformerConfig(TransformerConfig):
    """A transformer with multi-latent attention (DeepSeek-V2)."""

    multi_latent_attention: bool = True
    """Multi-latent attention."""
    q_lora_rank: int | None = 512
    """Rank of the query latent."""
    kv_lora_rank: int = 512
    """Rank of the key/value latent, shared by all heads."""
    qk_head_dim: int = 128
    """Width of a head's part without rotary embedding (Hugging Face: qk_nope_head_dim)."""
    qk_pos_emb_head_dim: int = 64
    """Width of a head's rotary part (Hugging Face: qk_rope_head_dim); 0 for none."""
    v_head_dim: int = 128
    """Width of a head's value."""
    qk_layernorm: bool = True
    """RMSNorm on the query and key/value latents; always on in the models this package trains."""
    attention_latent_norm_epsilon: float | None = None
    """Epsilon of the latent RMSNorms; layernorm_epsilon when unset (transformers fixes 1e-6)."""
    mla_rotary_interleaved: bool = True
    """Rotary pairs of the main attention: neighbours (released models) instead of halves."""
    rope_type: Literal["rope", "yarn"] = "yarn"
    """Rotary embedding: plain, or YaRN."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (Hugging Face: rope_theta)."""
    rotary_scaling_factor: float = 40.0
    """YaRN: context extension factor."""
    original_max_position_embeddings: int = 4096
    """YaRN: context length of the original model."""
    beta_fast: float = 32.0
    """YaRN: rotations above which a frequency is kept."""
    beta_slow: float = 1.0
    """YaRN: rotations below which a frequency is interpolated."""
    mscale: float = 1.0
    """YaRN: numerator of the factor on cos and sin."""
    mscale_all_dim: float = 0.0
    """YaRN: denominator of the factor on cos and sin, and the softmax scale's correction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim", *_ROTARY_NUMBERS):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to a positive number.")
        if self.qk_pos_emb_head_dim < 0 or self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"qk_pos_emb_head_dim={self.qk_pos_emb_head_dim} is negative or odd: rotary embedding needs pairs, so "
                "make it even (0 for no rotary part)."
            )
        if self.q_lora_rank is None or self.q_lora_rank <= 0 or not self.qk_layernorm:
            raise ValueError(
                f"q_lora_rank={self.q_lora_rank} with qk_layernorm={self.qk_layernorm}: this package's MLA needs a "
                "query latent with its RMSNorm; set q_lora_rank to a positive rank and qk_layernorm to True."
            )
        if self.dsa_match_engine is not None:
            from megatron.core.transformer.experimental_attention_variant.dsa.engines import apply_engine

            apply_engine(self.dsa_match_engine, vars(self), explicit=vars(self))
