"""The DSA options of one model, checked in one place.

``DSAConfig`` is the only thing that the rest of the package reads options from, and its ``__post_init__`` is the only
place that refuses one: each gate is one ``if`` with one message that names option, value, limit and remedy.
``from_transformer_config`` reads Megatron's flat fields from any object that has them, so that a Megatron-LM
configuration works too; fields that it lacks take this package's defaults.

What a kernel library or a device cannot do is not checked here: backends answer that when a module is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from .backends import backend_names
from .quantization import OPERAND_FORMATS

ScoringPrecision = Literal["bf16", "fp8", "fp32"]


def selects(layer_number: int, freq: int, offset: int) -> bool:
    """Megatron's rule of IndexShare: whether layer ``layer_number`` (1-based) owns an indexer."""
    return max(layer_number - max(offset, 1), 0) % freq == 0


@dataclass(frozen=True)
class DSAConfig:
    """Checked options. Names are Megatron's without the ``dsa_indexer_`` prefix; see ``TransformerConfig`` for each.

    Raises:
        ValueError: one sentence per gate.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    layernorm_epsilon: float
    n_heads: int
    head_dim: int
    topk: int
    multi_latent_attention: bool = True
    attention_dropout: float = 0.0
    add_bias_linear: bool = False
    layernorm_zero_centered_gamma: bool = False
    topk_freq: int | tuple[int, ...] = 1
    skip_topk_offset: int = 0
    loss_coeff: float | None = None
    use_sparse_loss: bool = False
    rope_interleaved: bool = False
    rotate_activation: bool = True
    scoring_relu: bool = True
    k_norm_epsilon: float | None = None
    k_norm_fp32: bool = False
    rope_fp32: bool = False
    rope_table_dtype: str = "model"
    scoring_precision: ScoringPrecision = "bf16"
    fp8_scale_format: str = "ue8m0"
    fp8_check_finite: bool = False
    kernel_backend: str = "none"
    deterministic_mode: bool = False
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: str = "allgather"
    sequence_parallel: bool = False

    @classmethod
    def from_transformer_config(cls, config: Any) -> DSAConfig:
        """Read the fields of a ``TransformerConfig`` (Megatron's names)."""
        values: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            for source in (f"dsa_indexer_{name}", f"dsa_{name}", name):
                if hasattr(config, source):
                    values[name] = getattr(config, source)
                    break
        if isinstance(values.get("topk_freq"), Sequence):
            values["topk_freq"] = tuple(values["topk_freq"])
        for name, field in cls.__dataclass_fields__.items():
            if field.default is MISSING:  # an object without MLA or DSA fields meets the gate that says so
                values.setdefault(name, 0)
        return cls(**values)

    def __post_init__(self) -> None:
        self._check_model()
        self._check_indexer_shape()
        self._check_sharing()
        self._check_precision()
        self._check_loss_and_backend()
        self._check_parallelism()

    @property
    def loss_enabled(self) -> bool:
        """Whether the indexer is trained."""
        return bool(self.loss_coeff)

    def computes_topk(self, layer_number: int) -> bool:
        """Whether layer ``layer_number`` (1-based) owns an indexer; the others reuse ``source_layer``'s selection."""
        assert 1 <= layer_number <= self.num_layers, f"layers are 1-based: {layer_number} of {self.num_layers}"
        if not isinstance(self.topk_freq, int):
            return bool(self.topk_freq[layer_number - 1])
        return selects(layer_number, self.topk_freq, self.skip_topk_offset)

    def source_layer(self, layer_number: int) -> int:
        """The layer (1-based) whose selection layer ``layer_number`` attends to."""
        while not self.computes_topk(layer_number):
            layer_number -= 1
        return layer_number

    def _check_model(self) -> None:
        if not self.multi_latent_attention:
            raise ValueError(
                "experimental_attention_variant='dsa' needs multi-latent attention, but multi_latent_attention is "
                "False: use MLATransformerConfig (--multi-latent-attention)."
            )
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim"):
            value = getattr(self, name)
            if value is None or value <= 0:
                raise ValueError(
                    f"{name} is {value}, but DSA attends to MLA's latents: use MLATransformerConfig and set it to a "
                    "positive number."
                )
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} was given, but the sparse kernels have none: set it to 0."
            )
        if self.add_bias_linear:
            raise ValueError(
                "DSA layers have no linear biases, but add_bias_linear is True: set it to False "
                "(--disable-bias-linear)."
            )
        if self.layernorm_zero_centered_gamma:
            raise ValueError(
                "layernorm_zero_centered_gamma=True is not supported with DSA: norm weights are plain factors here; "
                "set it to False."
            )

    def _check_indexer_shape(self) -> None:
        for name in ("n_heads", "head_dim", "topk"):
            value = getattr(self, name)
            if value is None or value <= 0:
                raise ValueError(f"dsa_indexer_{name} is {value}, but DSA needs it: set it to a positive number.")
        if self.head_dim < self.qk_pos_emb_head_dim:
            raise ValueError(
                f"dsa_indexer_head_dim={self.head_dim} is smaller than qk_pos_emb_head_dim={self.qk_pos_emb_head_dim}, "
                "the part of it that is rotated: enlarge the indexer head or shrink the rotary part."
            )
        if self.rotate_activation and self.head_dim & (self.head_dim - 1):
            raise ValueError(
                f"dsa_indexer_rotate_activation needs a head width that is a power of two, but dsa_indexer_head_dim is "
                f"{self.head_dim}: change the width or set dsa_indexer_rotate_activation to False."
            )

    def _check_sharing(self) -> None:
        if self.skip_topk_offset < 0:
            raise ValueError(
                f"dsa_indexer_skip_topk_offset={self.skip_topk_offset} is negative: use 0 or the number of first "
                "layers that all select."
            )
        if isinstance(self.topk_freq, int):
            if self.topk_freq < 1:
                raise ValueError(
                    f"dsa_indexer_topk_freq={self.topk_freq} is not a positive interval: use 1 (every layer selects) "
                    "or more."
                )
            return
        if len(self.topk_freq) != self.num_layers:
            raise ValueError(
                f"dsa_indexer_topk_freq has {len(self.topk_freq)} entries for {self.num_layers} layers: give one a "
                "layer."
            )
        if set(self.topk_freq) - {0, 1}:
            raise ValueError(
                f"dsa_indexer_topk_freq={list(self.topk_freq)} has entries other than 1 (selects) and 0 (reuses): use "
                "these."
            )
        if not self.topk_freq[0]:
            raise ValueError(
                "dsa_indexer_topk_freq makes layer 1 reuse a selection, but no layer comes before it: start the list "
                "with 1."
            )

    def _check_precision(self) -> None:
        if self.k_norm_epsilon is not None and not 0 <= self.k_norm_epsilon < math.inf:
            raise ValueError(
                f"dsa_indexer_k_norm_epsilon={self.k_norm_epsilon} is negative or not finite: use a small positive "
                "number (released models: 1e-6)."
            )
        if self.scoring_precision not in ("bf16", "fp8", "fp32"):
            raise ValueError(
                f"dsa_indexer_scoring_precision={self.scoring_precision!r} is unknown: use 'bf16', 'fp8' or 'fp32'."
            )
        if self.scoring_precision == "fp32" and self.kernel_backend != "none":
            raise ValueError(
                "dsa_indexer_scoring_precision='fp32' exists for the reference backend alone, but dsa_kernel_backend "
                f"is {self.kernel_backend!r}: use 'bf16', or dsa_kernel_backend='none'."
            )
        if self.scoring_precision == "fp8" and self.kernel_backend != "cudnn":
            raise ValueError(
                "dsa_indexer_scoring_precision='fp8' needs dsa_kernel_backend='cudnn', but it is "
                f"{self.kernel_backend!r}: set the backend, or score in 'bf16'."
            )
        if self.scoring_precision == "fp8" and self.loss_enabled:
            raise ValueError(
                f"dsa_indexer_scoring_precision='fp8' cannot train the indexer, but dsa_indexer_loss_coeff is "
                f"{self.loss_coeff}: set the coefficient to 0, or score in 'bf16'."
            )
        if self.rope_table_dtype not in ("model", "fp32"):
            raise ValueError(
                f"dsa_indexer_rope_table_dtype={self.rope_table_dtype!r} is unknown: use 'model' or 'fp32'."
            )
        if self.fp8_scale_format not in OPERAND_FORMATS:
            raise ValueError(
                f"dsa_indexer_fp8_scale_format={self.fp8_scale_format!r} is unknown: use 'ue8m0', 'fp32' or 'fp32_k'."
            )

    def _check_loss_and_backend(self) -> None:
        if self.kernel_backend not in backend_names():
            raise ValueError(
                f"dsa_kernel_backend={self.kernel_backend!r} is unknown: use one of {', '.join(backend_names())}."
            )
        if self.loss_coeff is not None and not 0 <= self.loss_coeff < math.inf:
            raise ValueError(
                f"dsa_indexer_loss_coeff={self.loss_coeff} is negative or not finite: use a positive coefficient, or 0 "
                "to freeze the indexer."
            )
        if self.use_sparse_loss and self.loss_coeff is None:
            raise ValueError(
                "dsa_indexer_use_sparse_loss is set without dsa_indexer_loss_coeff: give the coefficient (0 freezes "
                "the indexer), or drop the sparse loss."
            )

    def _check_parallelism(self) -> None:
        for name in ("tensor_model_parallel_size", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is no number of ranks: use 1 or more.")
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        if cp > 1 and self.cp_comm_type != "allgather":
            raise ValueError(
                f"context_parallel_size={cp} with DSA gathers keys, but cp_comm_type is {self.cp_comm_type!r}: set "
                "cp_comm_type='allgather'."
            )
        if self.sequence_parallel and tp == 1:
            raise ValueError(
                "sequence_parallel shards rows over tensor-parallel ranks, but tensor_model_parallel_size is 1: raise "
                "it, or drop sequence_parallel."
            )
        if self.num_attention_heads % tp:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} does not split over tensor_model_parallel_size={tp}: "
                "use a divisor of the heads."
            )
