"""Every gate of ``DSAConfig``, through itself and through ``MLATransformerConfig``; the IndexShare rule; the defaults.

A gate's message has to name the option, the value that came and the remedy; the last test of the table counts the
``raise`` statements of the module, so that a gate without a row here is found.
"""

from __future__ import annotations

import ast
import traceback
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.transformer.experimental_attention_variant.dsa import DSAConfig
from megatron.core.transformer.experimental_attention_variant.dsa import config as config_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VALID: dict[str, Any] = dict(
    num_layers=6,
    hidden_size=32,
    num_attention_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    layernorm_epsilon=1e-5,
    n_heads=2,
    head_dim=8,
    topk=4,
)
# What a model configuration needs besides.
SWIGLU: dict[str, Any] = dict(gated_linear_unit=True, activation_func="silu", add_bias_linear=False)


def flat_name(name: str) -> str:
    """The name of a ``DSAConfig`` field in the model configuration."""
    known = {field.name for field in fields(MLATransformerConfig)}
    return next(n for n in (f"dsa_indexer_{name}", f"dsa_{name}", name) if n in known)


def model_config(**overrides: Any) -> MLATransformerConfig:
    values = {flat_name(name): value for name, value in (VALID | overrides).items()}
    return MLATransformerConfig(**(SWIGLU | {"experimental_attention_variant": "dsa"} | values))


# What is wrong, and pieces of the sentence: the option, its value, the remedy.
GATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no MLA": (
        {"multi_latent_attention": False},
        ("experimental_attention_variant='dsa'", "multi_latent_attention is False", "use MLATransformerConfig"),
    ),
    "dropout": ({"attention_dropout": 0.1}, ("attention_dropout=0.1", "to 0")),
    "linear bias": ({"add_bias_linear": True}, ("add_bias_linear is True", "set it to False", "--disable-bias-linear")),
    "zero-centred norms": (
        {"layernorm_zero_centered_gamma": True},
        ("layernorm_zero_centered_gamma=True", "set it to False"),
    ),
    "no query latent": ({"q_lora_rank": None}, ("q_lora_rank is None", "use MLATransformerConfig", "positive")),
    "no heads": ({"n_heads": None}, ("dsa_indexer_n_heads is None", "set it to a positive number")),
    "negative heads": ({"n_heads": -2}, ("dsa_indexer_n_heads is -2", "set it to a positive number")),
    "no head width": ({"head_dim": 0}, ("dsa_indexer_head_dim is 0", "set it to a positive number")),
    "no top-k": ({"topk": None}, ("dsa_indexer_topk is None", "set it to a positive number")),
    "zero top-k": ({"topk": 0}, ("dsa_indexer_topk is 0", "set it to a positive number")),
    "head narrower than its rotary part": (
        {"head_dim": 2},
        ("dsa_indexer_head_dim=2", "qk_pos_emb_head_dim=4", "enlarge the indexer head"),
    ),
    "rotation of 12 channels": (
        {"head_dim": 12},
        ("dsa_indexer_rotate_activation", "power of two", "dsa_indexer_head_dim is 12", "to False"),
    ),
    "negative offset": ({"skip_topk_offset": -1}, ("dsa_indexer_skip_topk_offset=-1 is negative", "use 0")),
    "interval of 0": ({"topk_freq": 0}, ("dsa_indexer_topk_freq=0", "use 1")),
    "list too short": (
        {"topk_freq": (1, 0, 0)},
        ("dsa_indexer_topk_freq has 3 entries for 6 layers", "give one a layer"),
    ),
    "list of other numbers": (
        {"topk_freq": (1, 2, 0, 0, 0, 0)},
        ("dsa_indexer_topk_freq=[1, 2, 0, 0, 0, 0]", "other than 1 (selects) and 0 (reuses)", "use these"),
    ),
    "first layer reuses": (
        {"topk_freq": (0, 1, 1, 1, 1, 1)},
        ("dsa_indexer_topk_freq makes layer 1 reuse", "start the list with 1"),
    ),
    "unknown precision": (
        {"scoring_precision": "int8"},
        ("dsa_indexer_scoring_precision='int8'", "'bf16', 'fp8' or 'fp32'"),
    ),
    "FP32 scoring on kernels": (
        {"scoring_precision": "fp32", "kernel_backend": "cudnn"},
        ("dsa_indexer_scoring_precision='fp32'", "dsa_kernel_backend is 'cudnn'", "use 'bf16'"),
    ),
    "FP8 scoring without kernels": (
        {"scoring_precision": "fp8"},
        ("dsa_indexer_scoring_precision='fp8'", "dsa_kernel_backend='cudnn'", "it is 'none'", "score in 'bf16'"),
    ),
    "FP8 scoring in training": (
        {"scoring_precision": "fp8", "kernel_backend": "cudnn", "loss_coeff": 0.5},
        ("dsa_indexer_scoring_precision='fp8'", "dsa_indexer_loss_coeff is 0.5", "set the coefficient to 0"),
    ),
    "unknown table type": ({"rope_table_dtype": "fp16"}, ("dsa_indexer_rope_table_dtype='fp16'", "'model' or 'fp32'")),
    "unknown scale format": ({"fp8_scale_format": "e5m2"}, ("dsa_indexer_fp8_scale_format='e5m2'", "use 'ue8m0'")),
    "unknown backend": ({"kernel_backend": "cuda"}, ("dsa_kernel_backend='cuda'", "use one of none, cudnn")),
    "negative coefficient": ({"loss_coeff": -0.1}, ("dsa_indexer_loss_coeff=-0.1 is negative", "0 to freeze")),
    "coefficient that is no number": (
        {"loss_coeff": float("nan")},
        ("dsa_indexer_loss_coeff=nan is", "not finite", "0 to freeze"),
    ),
    "negative key norm epsilon": (
        {"k_norm_epsilon": -1e-6},
        ("dsa_indexer_k_norm_epsilon=-1e-06 is negative", "1e-6"),
    ),
    "sparse loss without coefficient": (
        {"use_sparse_loss": True},
        ("dsa_indexer_use_sparse_loss", "without dsa_indexer_loss_coeff", "give the coefficient"),
    ),
    "no tensor-parallel ranks": (
        {"tensor_model_parallel_size": 0},
        ("tensor_model_parallel_size=0", "no number of ranks", "use 1 or more"),
    ),
    "negative context-parallel ranks": ({"context_parallel_size": -2}, ("context_parallel_size=-2", "use 1 or more")),
    "ring of keys": (
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        ("context_parallel_size=2", "cp_comm_type is 'p2p'", "cp_comm_type='allgather'"),
    ),
    "sequence parallel alone": (
        {"sequence_parallel": True},
        ("sequence_parallel", "tensor_model_parallel_size is 1", "raise it"),
    ),
    "heads that do not split": (
        {"tensor_model_parallel_size": 3},
        ("num_attention_heads=4", "tensor_model_parallel_size=3", "use a divisor"),
    ),
}


def assert_sentence(error: ValueError, pieces: tuple[str, ...]) -> None:
    message = str(error)
    assert [piece for piece in pieces if piece not in message] == [], message
    assert message.endswith(".") and "\n" not in message and "  " not in message


@pytest.mark.parametrize("name", GATES)
def test_dsa_config_refuses(name: str) -> None:
    overrides, pieces = GATES[name]
    with pytest.raises(ValueError) as caught:
        DSAConfig(**(VALID | overrides))
    assert_sentence(caught.value, pieces)


@pytest.mark.parametrize("name", GATES)
def test_the_model_configuration_refuses_alike(name: str) -> None:
    overrides, pieces = GATES[name]
    with pytest.raises(ValueError) as caught:
        model_config(**overrides)
    assert_sentence(caught.value, pieces)


def test_the_table_covers_every_gate() -> None:
    path = Path(config_module.__file__)
    gates = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)}
    reached = set()
    for overrides, _ in GATES.values():
        try:
            DSAConfig(**(VALID | overrides))
        except ValueError as error:
            reached.add(traceback.extract_tb(error.__traceback__)[-1].lineno)
    assert reached == gates


ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "FP8 selection": {"scoring_precision": "fp8", "kernel_backend": "cudnn"},
    "FP8 selection with a coefficient of 0": {
        "scoring_precision": "fp8",
        "kernel_backend": "cudnn",
        "loss_coeff": 0.0,
    },
    "FP32 reference": {"scoring_precision": "fp32"},
    "sparse loss": {"use_sparse_loss": True, "loss_coeff": 0.1},
    "sparse loss, frozen": {"use_sparse_loss": True, "loss_coeff": 0.0},
    "odd width without rotation": {"head_dim": 12, "rotate_activation": False},
    "head that is all rotary": {"head_dim": 4},
    "context parallel": {"context_parallel_size": 2, "cp_comm_type": "allgather"},
    "sequence parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    "shared": {"topk_freq": 4, "skip_topk_offset": 3},
    "explicit list": {"topk_freq": (1, 0, 0, 1, 0, 0)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_supported_passes(name: str) -> None:
    expected = DSAConfig(**(VALID | ACCEPTED[name] | {"cp_comm_type": model_config(**ACCEPTED[name]).cp_comm_type}))
    assert model_config(**ACCEPTED[name]).dsa_config() == expected
    assert expected.loss_enabled == bool(ACCEPTED[name].get("loss_coeff"))


@pytest.mark.parametrize("mla", [False, True], ids=["dense attention", "the flag alone"])
def test_a_configuration_without_latents_meets_a_gate_and_no_type_error(mla: bool) -> None:
    known = {field.name for field in fields(TransformerConfig)}
    values = {flat_name(name): value for name, value in VALID.items() if flat_name(name) in known}
    with pytest.raises(ValueError, match="use MLATransformerConfig"):
        TransformerConfig(**SWIGLU, **values, multi_latent_attention=mla, experimental_attention_variant="dsa")


def test_without_dsa_nothing_is_asked() -> None:
    assert MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=3, **SWIGLU).dsa_indexer_topk is None


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("freq", range(1, 8))
def test_which_layers_select(freq: int, offset: int) -> None:
    config = DSAConfig(**(VALID | {"num_layers": 30}), topk_freq=freq, skip_topk_offset=offset)
    # transformers counts layers from 0 and makes layer 0 unusable for offset 0; Megatron reads 0 as 1.
    selects = [max(index - max(offset, 1) + 1, 0) % freq == 0 for index in range(30)]
    assert [config.computes_topk(number) for number in range(1, 31)] == selects
    nearest = [max(n for n in range(1, number + 1) if selects[n - 1]) for number in range(1, 31)]
    assert [config.source_layer(number) for number in range(1, 31)] == nearest


def test_glm_5_2_selects_in_21_of_78_layers() -> None:
    config = DSAConfig(**(VALID | {"num_layers": 78}), topk_freq=4, skip_topk_offset=3)
    selecting = [number for number in range(1, 79) if config.computes_topk(number)]
    assert selecting == [1, 2, 3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75]
    assert len(selecting) == 21 and 78 - len(selecting) == 57
    assert [config.source_layer(number) for number in (4, 6, 7, 10, 78)] == [3, 3, 7, 7, 75]


def test_an_explicit_list_is_followed() -> None:
    for pattern in ((1, 1, 0, 0, 1, 0), [1, 1, 0, 0, 1, 0]):
        config = model_config(topk_freq=pattern).dsa_config()
        assert [config.source_layer(number) for number in range(1, 7)] == [1, 2, 2, 2, 5, 5]
        assert hash(config) == hash(DSAConfig(**VALID, topk_freq=(1, 1, 0, 0, 1, 0), cp_comm_type="p2p"))
    direct = DSAConfig(**VALID, topk_freq=[1, 1, 0, 0, 1, 0])  # type: ignore[arg-type]
    assert [direct.source_layer(number) for number in range(1, 7)] == [1, 2, 2, 2, 5, 5]


@pytest.mark.parametrize("number", [0, -1, 7])
@pytest.mark.parametrize("freq", [1, 2, (1, 0, 0, 0, 0, 0)], ids=str)
def test_a_layer_outside_the_model_is_no_layer(number: int, freq: Any) -> None:
    with pytest.raises(AssertionError, match="1-based"):
        DSAConfig(**VALID, topk_freq=freq).source_layer(number)


def test_defaults_are_megatrons() -> None:
    megatron = dict(
        experimental_attention_variant=None,
        dsa_indexer_n_heads=None,
        dsa_indexer_head_dim=None,
        dsa_indexer_topk=None,
        dsa_indexer_topk_freq=1,
        dsa_indexer_skip_topk_offset=0,
        dsa_indexer_loss_coeff=None,
        dsa_indexer_use_sparse_loss=False,
        dsa_indexer_rope_interleaved=False,
        dsa_indexer_rotate_activation=True,
        dsa_indexer_scoring_relu=True,
        dsa_indexer_k_norm_epsilon=None,
        dsa_indexer_k_norm_fp32=False,
        dsa_kernel_backend="none",
    )
    # This package's own options start where they change nothing.
    own = dict(
        dsa_indexer_rope_fp32=False,
        dsa_indexer_scoring_precision="bf16",
        dsa_indexer_rope_table_dtype="model",
        dsa_indexer_fp8_scale_format="ue8m0",
        attention_latent_norm_epsilon=None,
    )
    defaults = {field.name: field.default for field in fields(MLATransformerConfig)}
    assert {name: defaults[name] for name in megatron | own} == megatron | own


def test_both_classes_have_the_same_defaults() -> None:
    model = {field.name: field.default for field in fields(MLATransformerConfig)}
    # Without a model configuration around it, DSAConfig takes what DSA needs.
    needed = {"add_bias_linear", "cp_comm_type"}
    mine = {f.name: f.default for f in fields(DSAConfig) if f.name not in {*VALID, *needed}}
    assert mine == {name: model[flat_name(name)] for name in mine}


def test_an_object_without_our_fields_takes_our_defaults() -> None:
    """A Megatron-LM configuration has no ``dsa_indexer_scoring_precision``, for one."""
    names = {"scoring_precision", "rope_fp32", "rope_table_dtype", "fp8_scale_format"}
    megatron = {flat_name(name): value for name, value in VALID.items()}
    config = DSAConfig.from_transformer_config(SimpleNamespace(**megatron, multi_latent_attention=True))
    defaults = {field.name: field.default for field in fields(DSAConfig)}
    assert {name: getattr(config, name) for name in names} == {name: defaults[name] for name in names}
