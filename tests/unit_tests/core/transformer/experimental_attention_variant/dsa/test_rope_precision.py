"""The indexer's precision from its projections to the scoring boundary: rope_fp32, the table dtype, Hadamard.

Everything starts after the projections (they are stubs that hand out raw values), since a matrix product's bits depend
on its row count. Golden file 13 holds raw projections and what each inference engine's rounding policy makes of them,
by an independent implementation that forms the LayerNorm in FP64: another order of sums or a fused multiply-add changes
about 1e-6 of its bytes, so 1e-4 may differ.
"""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_builder import build_gpt_model
from megatron.core.models.gpt.presets import get_preset
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer, DSAIndexerSubmodules, Layout
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.layout import positions
from megatron.core.transformer.experimental_attention_variant.dsa.precision import (
    quantize_operands,
    to_scoring_precision,
)
from megatron.core.transformer.experimental_attention_variant.dsa.reference import score, select
from megatron.core.transformer.transformer_config import MLATransformerConfig

from .golden_fp8 import HEAD_DIM, POLICIES, golden, visible

HEADS, ROPE = 8, 64
FAR = torch.tensor([0, 4097, 131071])


class Passes(nn.Module):
    """A projection that hands its input on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Gate(Passes):
    """Head weights that are the leading channels of the hidden state."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :HEADS]


def build(**options: Any) -> DSAIndexer:
    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HEAD_DIM, "num_attention_heads": 2, "q_lora_rank": HEADS * HEAD_DIM,
        "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": ROPE, "v_head_dim": 8, "rope_type": "rope",
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu", "bf16": True,
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": HEADS, "dsa_indexer_head_dim": HEAD_DIM,
        "dsa_indexer_topk": 12, "dsa_indexer_k_norm_epsilon": 1e-6, "dsa_indexer_k_norm_fp32": True,
    }  # fmt: skip
    config = MLATransformerConfig(**values | {f"dsa_indexer_{name}": value for name, value in options.items()})
    indexer = DSAIndexer(config, DSAIndexerSubmodules(Passes, Passes, None, Gate))
    with torch.no_grad():
        indexer.k_norm.weight.copy_(golden(POLICIES)["ln_weight"])
        indexer.k_norm.bias.copy_(golden(POLICIES)["ln_bias"])
    return indexer


def run(indexer: DSAIndexer, positions_T: Tensor, rows: slice = slice(None)) -> IndexerInputs:
    """The indexer on rows of the raw projections, at positions of the caller's choice."""
    file = golden(POLICIES)
    with torch.no_grad():
        made: IndexerInputs = indexer(file["k_raw"][rows], file["q_raw"][rows].flatten(1), positions_T)
    return made


def use_golden_tables(indexer: DSAIndexer) -> None:
    """File 13 was made with its own cosines and sines."""
    file = golden(POLICIES)
    del indexer.rotary
    indexer.rotary = lambda _, dtype: (file["cos"].to(dtype), file["sin"].to(dtype))


# An engine's rounding policy in this package's options. The file pairs halves but where a name says otherwise.
ENGINE_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm_fused": ("ue8m0", {"rope_fp32": True, "rotate_activation": False}),
    "vllm_fused_interleaved": (
        "ue8m0",
        {"rope_fp32": True, "rotate_activation": False, "rope_interleaved": True},
    ),
    "deepseek": ("ue8m0", {"rope_table_dtype": "fp32"}),
    "lmdeploy_fused": ("ue8m0", {"rotate_activation": False}),
    "sglang_fused": ("fp32", {"rope_fp32": True, "rope_table_dtype": "fp32", "rotate_activation": False}),
    "sglang_unfused": ("fp32_k", {"rope_table_dtype": "fp32"}),
}


def wrong_share(policy: str, scale_format: str, options: dict[str, Any]) -> float:
    """The share of code bytes that differ from the engine's."""
    file, indexer = golden(POLICIES), build(**options)
    use_golden_tables(indexer)
    made = quantize_operands(run(indexer, file["positions"]), scale_format)
    pairs = ((made.q_TID, f"{policy}.q"), (made.k_SD, f"{policy}.k"))
    wrong = sum(int((got.values.view(torch.uint8) != file[f"{name}_fp8"]).sum()) for got, name in pairs)
    wrong += sum(HEAD_DIM * int((got.scale != file[f"{name}_scale"]).sum()) for got, name in pairs)
    return wrong / sum(got.values.numel() for got, _ in pairs)


@pytest.mark.parametrize("policy", ENGINE_POLICIES)
def test_each_engines_policy_gives_its_bytes(policy: str) -> None:
    assert wrong_share(policy, *ENGINE_POLICIES[policy]) <= 1e-4


@pytest.mark.parametrize("policy", ENGINE_POLICIES)
def test_each_engines_policy_gives_its_set(policy: str) -> None:
    file, (scale_format, options) = golden(POLICIES), ENGINE_POLICIES[policy]
    indexer = build(**options)
    use_golden_tables(indexer)
    made = run(indexer, file["positions"])
    weighted = IndexerInputs(made.q_TID, made.k_SD, file["gate"] * (HEADS * HEAD_DIM) ** -0.5)
    topk = select(score(quantize_operands(weighted, scale_format)), visible(POLICIES), 12)
    assert torch.equal(topk.indices_TK, file[f"{policy}.topk_ids"])


FLIPPED = {
    "rope_fp32": (False, True),
    "rope_table_dtype": ("model", "fp32"),
    "rotate_activation": (True, False),
    "rope_interleaved": (False, True),
    "k_norm_epsilon": (1e-6, 1e-1),
}


@pytest.mark.parametrize("option", FLIPPED)
@pytest.mark.parametrize("policy", ENGINE_POLICIES)
def test_each_option_matters_to_each_policy(policy: str, option: str) -> None:
    scale_format, options = ENGINE_POLICIES[policy]
    default, other = FLIPPED[option]
    flipped = default if options.get(option, default) == other else other
    assert wrong_share(policy, scale_format, {**options, option: flipped}) > 5e-4


@pytest.mark.parametrize("policy", ENGINE_POLICIES)
def test_the_scale_format_matters_to_each_policy(policy: str) -> None:
    scale_format, options = ENGINE_POLICIES[policy]
    for other in {"ue8m0", "fp32", "fp32_k"} - {scale_format}:
        assert wrong_share(policy, other, options) > 1e-2


# ---- bit for bit, at positions that BF16 cannot hold ----


def rounded(x: np.ndarray) -> np.ndarray:
    """FP32 to BF16 to nearest even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return kept.astype(np.uint32).view(np.float32)


def rotate(x: np.ndarray, tables: tuple[np.ndarray, np.ndarray], interleaved: bool, low: bool) -> np.ndarray:
    """The front of each vector rotated, one FP32 operation at a time; with ``low`` each is rounded to BF16."""
    keep = rounded if low else (lambda value: value.astype(np.float32))
    out = x.copy()
    for pair in range(ROPE // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + ROPE // 2)
        cos, sin = (table[:, pair].reshape(-1, *[1] * (x.ndim - 2)) for table in tables)
        out[..., a] = keep(keep(x[..., a] * cos) - keep(x[..., b] * sin))
        out[..., b] = keep(keep(x[..., b] * cos) + keep(x[..., a] * sin))
    return out


def expected(rope_fp32: bool, table: str, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """q and k at ``FAR``, from the projection and from the key norm on."""
    indexer = build(rope_fp32=rope_fp32, rotate_activation=False)
    file = golden(POLICIES)
    with torch.no_grad():
        k = indexer.k_norm(file["k_raw"][:3]).float().numpy()
    cos, sin = (t.numpy() for t in indexer.rotary(FAR, torch.float32))
    tables = (cos, sin) if table == "fp32" else (rounded(cos), rounded(sin))
    low = not rope_fp32 and table == "model"
    q, k = (rotate(x, tables, interleaved, low) for x in (file["q_raw"][:3].float().numpy(), k))
    return (q, k) if rope_fp32 else (rounded(q), rounded(k))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("table", ["model", "fp32"])
@pytest.mark.parametrize("rope_fp32", [False, True])
def test_operands_are_the_rotation_bit_for_bit(rope_fp32: bool, table: str, interleaved: bool) -> None:
    options = {"rope_fp32": rope_fp32, "rope_table_dtype": table, "rope_interleaved": interleaved}
    made = run(build(**options, rotate_activation=False), FAR, slice(0, 3))
    q, k = (torch.from_numpy(x) for x in expected(rope_fp32, table, interleaved))
    carrier = torch.float32 if rope_fp32 else torch.bfloat16
    assert made.q_TID.dtype == made.k_SD.dtype == carrier and made.w_TI.dtype == torch.float32
    assert torch.equal(made.q_TID.float(), q) and torch.equal(made.k_SD.float(), k)
    scored = to_scoring_precision(made, "bf16")
    assert isinstance(scored, IndexerInputs)
    assert torch.equal(scored.q_TID.float(), torch.from_numpy(rounded(q.numpy())))
    assert torch.equal(scored.k_SD.float(), torch.from_numpy(rounded(k.numpy())))


def test_the_four_combinations_differ() -> None:
    made = [expected(rope_fp32, table, False)[1] for rope_fp32 in (False, True) for table in ("model", "fp32")]
    for i, first in enumerate(made):
        assert all((first != other).any() for other in made[i + 1 :])


def test_positions_are_not_rounded_to_bf16() -> None:
    """131071 is 131072 in BF16, and 4097 is 4096."""
    indexer = build(rotate_activation=False)
    for near, far in ((4096, 4097), (131072, 131071)):
        tables = indexer.rotary(torch.tensor([near, far]), torch.float32)
        assert all((table[0] != table[1]).any() for table in tables)


def test_fp32_carriers_are_hadamard_rotated_in_fp32() -> None:
    made, plain = (run(build(rope_fp32=True, rotate_activation=on), FAR, slice(0, 3)) for on in (True, False))
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < HEAD_DIM:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    exact = plain.k_SD.double() @ hadamard * HEAD_DIM**-0.5
    assert made.k_SD.dtype == torch.float32
    assert (made.k_SD - exact).abs().max() < 1e-6 * exact.abs().max()


# ---- off, nothing changed ----

# SHA-256 of q, k and w of file 13's rows at `RECORDED_AT`, with every precision option left at its default.
RECORDED_AT = 37 * torch.arange(48) + 11
RECORDED = {
    (False, True): "4e60d41746933c8e610cd511a53c7516082687f1f27456a5734636f81977bcb3",
    (False, False): "d5e92b331c7bbe19072748bd0a3917b584e9c082ff9e47bfdbe853abd013dfc7",
    (True, True): "778b1e01f473ee12b2a173caeb25b5b2b9c8a56e54ce4cb8695e7f9f3aec6232",
    (True, False): "fe69a4ee8f308d2660cb62c006b4973a3236fdee821e9a1bc30ea1f954a28fa2",
}


def digest(made: IndexerInputs) -> str:
    parts = (made.q_TID, made.k_SD, made.w_TI)
    return hashlib.sha256(b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)).hexdigest()


@pytest.mark.parametrize(("interleaved", "rotated"), RECORDED)
def test_off_gives_the_recorded_bytes(interleaved: bool, rotated: bool) -> None:
    made = run(build(rope_interleaved=interleaved, rotate_activation=rotated, k_norm_fp32=False), RECORDED_AT)
    assert made.q_TID.dtype == made.k_SD.dtype == torch.bfloat16
    assert digest(made) == RECORDED[interleaved, rotated]


def test_the_options_leave_the_parameters_alone() -> None:
    plain, precise = build(k_norm_fp32=False), build(k_norm_fp32=False, rope_fp32=True, rope_table_dtype="fp32")
    kinds = [{name: p.dtype for name, p in indexer.named_parameters()} for indexer in (plain, precise)]
    assert kinds[0] == kinds[1] == {"k_norm.weight": torch.bfloat16, "k_norm.bias": torch.bfloat16}


# ---- the same in every layout ----

LAYOUTS = {
    "batch": (Layout.causal(2, 24), [*range(24)] * 2),
    "packed": (Layout.packed((0, 5, 12, 48)), [*range(5), *range(7), *range(36)]),
    "zigzag": (Layout.zigzag((0, 96), 2, 1), [*range(24, 48), *range(48, 72)]),
    "rows": (Layout.causal(1, 96).slice_rows(40, 88), [*range(40, 88)]),
}


@pytest.mark.parametrize("rope_fp32", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_rotates_a_row_as_if_it_stood_alone(name: str, rope_fp32: bool) -> None:
    layout, expected_positions = LAYOUTS[name]
    indexer = build(rope_fp32=rope_fp32, rope_table_dtype="fp32")
    made = run(indexer, positions(layout, "cpu"))
    for row in (0, 4, 23, 24, 47):
        alone = run(indexer, torch.tensor([expected_positions[row]]), slice(row, row + 1))
        assert torch.equal(made.q_TID[row], alone.q_TID[0]) and torch.equal(made.k_SD[row], alone.k_SD[0])


# ---- the main attention has a rope of its own ----


def test_the_options_do_not_touch_the_main_attention() -> None:
    """Where every key is selected, what the indexer computes reaches nothing."""
    logits = []
    for precise in (False, True):
        config = replace(
            get_preset("tiny-glm5"),
            vocab_size=64,
            num_layers=2,
            moe_layer_freq=[0, 1],
            bf16=True,
            dsa_indexer_topk=32,
            dsa_indexer_rope_fp32=precise,
            dsa_indexer_rope_table_dtype="fp32" if precise else "model",
        )
        torch.manual_seed(0)
        model = build_gpt_model(config).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(32)[None]))
    assert torch.equal(logits[0], logits[1])
