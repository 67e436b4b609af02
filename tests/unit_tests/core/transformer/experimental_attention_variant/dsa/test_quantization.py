"""E4M3 quantization, FP8 operands and their scores in the reference, byte for byte against golden files 01 to 12."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import precision, quantization, reference
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    IndexerInputs,
    QuantizedInputs,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.precision import (
    Quantized,
    quantize_e4m3,
    quantize_operands,
    to_scoring_precision,
)
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from .golden_fp8 import FINITE, bits, fp8_config, golden, is_exact, layout, mutant, operands, visible


def wrong_bytes(number: str, name: str, module: ModuleType = quantization) -> int:
    """Bytes of the codes and scales of one golden tensor that come out differently."""
    file = golden(number)
    made = module.quantize_e4m3(file[name])
    return int(
        (made.values.view(torch.uint8) != file[f"{name}_fp8"]).sum()
        + (bits(made.scale) != bits(file[f"{name}_scale"])).sum()
    )


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("number", [*FINITE, "12"])
def test_codes_and_scales_are_the_golden_bytes(number: str, name: str) -> None:
    assert wrong_bytes(number, name) == 0


@pytest.mark.parametrize("number", FINITE)
def test_scales_are_powers_of_two_and_head_weights_carry_them(number: str) -> None:
    file, made = golden(number), quantize_operands(operands(number))
    assert torch.equal((made.q_TID.scale.view(torch.int32) >> 23).to(torch.uint8), file["q_scale_e8m0"])
    assert torch.equal((made.k_SD.scale.view(torch.int32) >> 23).to(torch.uint8), file["k_scale_e8m0"])
    assert made.w_TI.dtype == torch.float32
    assert torch.equal(bits(made.w_TI), bits(file["w"]))


@pytest.mark.parametrize("number", FINITE)
def test_the_reference_scores_and_selects_as_the_golden_files(number: str) -> None:
    topk = ReferenceBackend(fp8_config(number)).select(
        operands(number), layout(number), golden(number)["topk_ids"].shape[1]
    )
    assert failures(number, reference, quantize_operands(operands(number))) == []
    assert torch.equal(topk.indices_TK, golden(number)["topk_ids"])


def failures(number: str, module: ModuleType, quantized: QuantizedInputs) -> list[str]:
    """What differs from a golden file when ``module`` (the reference, or a mutant of it) scores and selects."""
    file, seen = golden(number), visible(number)
    scores = module.score(quantized)
    topk: TopK = module.select(scores, seen, file["topk_ids"].shape[1])
    tolerance = torch.zeros_like(file["tol"]) if is_exact(number) else file["tol"]
    found = []
    if not ((scores - file["logits"]).abs() <= tolerance)[seen].all():
        found.append("logits")
    chosen = module.selected_mask(topk.indices_TK, seen.shape[1])
    if (file["must"].bool() & ~chosen).any() or (chosen & ~file["may"].bool()).any():
        found.append("set")
    if not torch.equal(topk.indices_TK, file["topk_ids"]):
        found.append("ids")
    return found


QUANTIZATION_RULES = {
    "amax is of absolute values": ("values.abs().amax(-1)", "values.amax(-1)", "08"),
    "amax is exact, not in bf16": ("x.detach().float()", "x.detach().bfloat16().float()", "09"),
    "floor too low": ("AMAX_FLOOR = 1e-4", "AMAX_FLOOR = 1e-6", "05"),
    "floor too high": ("AMAX_FLOOR = 1e-4", "AMAX_FLOOR = 1e-3", "05"),
    "the maximum is 448": ("E4M3_MAX = 448.0", "E4M3_MAX = 447.0", "03"),
    "a scale is at least the quotient": ("((bits & _MANTISSA_MASK) != 0).int()", "0", "08"),
    "an exact power is kept": ("((bits & _MANTISSA_MASK) != 0).int()", "1", "03"),
    "no log2 in floating point": (
        "_power_of_two_at_least(bounded * (1 / E4M3_MAX))",
        "(bounded / E4M3_MAX).log2().ceil().exp2()",
        "03",
    ),
    "ties go to even": (
        "codes.to(torch.float8_e4m3fn)",
        "codes.nextafter(torch.zeros_like(codes)).to(torch.float8_e4m3fn)",
        "06",
    ),
    "subnormal codes exist": (
        "codes.to(torch.float8_e4m3fn)",
        "(codes * (codes.abs() >= 2.0**-6)).to(torch.float8_e4m3fn)",
        "05",
    ),
    "zero keeps its sign": ("codes.to(torch.float8_e4m3fn)", "(codes + 0.0).to(torch.float8_e4m3fn)", "02"),
    "a bad vector is NaN as a whole": ("scaled.where(finite.unsqueeze(-1), torch.nan)", "scaled", "12"),
    "a bad vector has no scale": ("scale.where(finite, torch.nan)", "scale", "12"),
}


@pytest.mark.parametrize("rule", QUANTIZATION_RULES)
def test_a_golden_file_notices_each_broken_quantization_rule(rule: str) -> None:
    old, new, number = QUANTIZATION_RULES[rule]
    changed = mutant(quantization, old, new)
    assert wrong_bytes(number, "q", changed) + wrong_bytes(number, "k", changed) > 0


def test_only_fp32_inputs_can_tell_a_log2_rule() -> None:
    old, new, _ = QUANTIZATION_RULES["no log2 in floating point"]
    changed = mutant(quantization, old, new)
    assert wrong_bytes("04", "q", changed) == 0


SCORE_RULES = {
    "keys have scales": ("score(indexer.codes(), relu) * indexer.k_SD.scale", "score(indexer.codes(), relu)", "08"),
    "relu comes before the weight": (
        'logits_TIS = logits_TIS.relu() if relu else logits_TIS\n    return torch.einsum("ti,tis->ts", '
        "indexer.w_TI.to(dtype), logits_TIS)",
        "return (indexer.w_TI.to(dtype)[..., None] * logits_TIS).relu().sum(1)",
        "02",
    ),
    "every key is scored with relu": ("logits_TIS.relu() if relu else logits_TIS", "logits_TIS", "08"),
    "ties go to the lowest id": (
        "torch.where(visible_TS, finite_TS, -torch.inf).sort(dim=-1, descending=True, stable=True).indices",
        "torch.where(visible_TS, scores_TS, -torch.inf).flip(-1).sort(dim=-1, descending=True, stable=True)"
        ".indices.sub(scores_TS.shape[1] - 1).neg()",
        "01",
    ),
    "keys outside the row's range are not": ("torch.where(visible_TS, finite_TS, -torch.inf)", "scores_TS", "11"),
    "a short row is padded with -1": ("ids_TK.masked_fill(past_TK, -1)", "ids_TK", "08"),
    "ids ascend": (".masked_fill(past_TK, num_keys).sort(dim=-1).values", ".masked_fill(past_TK, num_keys)", "08"),
}


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_golden_file_notices_each_broken_score_rule(rule: str) -> None:
    old, new, number = SCORE_RULES[rule]
    assert failures(number, mutant(reference, old, new), quantize_operands(operands(number))) != []


WEIGHT_RULES = {
    "weights carry the scale": ("indexer.w_TI.detach().float() * q.scale", "indexer.w_TI.detach().float()", "08"),
    "weights stay FP32": (
        "indexer.w_TI.detach().float() * q.scale",
        "(indexer.w_TI.detach().bfloat16() * q.scale).float()",
        "10",
    ),
    "the product is not rounded": (
        "indexer.w_TI.detach().float() * q.scale",
        "(indexer.w_TI.detach().float() * q.scale).bfloat16().float()",
        "10",
    ),
}


@pytest.mark.parametrize("rule", WEIGHT_RULES)
def test_a_golden_file_notices_each_broken_weight_rule(rule: str) -> None:
    old, new, number = WEIGHT_RULES[rule]
    made = mutant(precision, old, new).quantize_operands(operands(number))
    assert not torch.equal(bits(made.w_TI), bits(golden(number)["w"]))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sort_by_bits(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """As radix selectors sort: FP32 by its bits as ordered integers, in which -0.0 comes before 0.0."""
    keys = x if x.dtype != torch.float32 else x.view(torch.int32) ^ ((x.view(torch.int32) >> 31) & 0x7FFFFFFF)
    return torch.sort(keys, dim=dim, descending=descending, stable=stable)


@pytest.mark.parametrize("by_bits", [False, True], ids=["torch's sort", "a sort by bits"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("columns", "k"), [(4, 2), (300, 64), (6000, 2048)])
def test_negative_zero_ranks_as_zero(
    columns: int, k: int, device: str, by_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a sort orders the two zeros."""
    if by_bits:
        monkeypatch.setattr(Tensor, "sort", sort_by_bits)
    scores = torch.zeros(3, columns, device=device)
    scores[:, ::2] = -0.0
    scores[1, -1] = 1.0
    ids = reference.select(scores, torch.ones(3, columns, dtype=torch.bool, device=device), k).indices_TK.cpu()
    lowest = torch.arange(k, dtype=torch.int32)
    assert torch.equal(ids, torch.stack((lowest, torch.cat((lowest[:-1], torch.tensor([columns - 1]).int())), lowest)))


@pytest.mark.parametrize("octave", [-14, 0, 37])
def test_the_scale_is_the_exact_ceiling_for_every_mantissa(octave: int) -> None:
    values = ((torch.arange(2**23, dtype=torch.int32)) + ((octave + 127) << 23)).view(torch.float32)
    scale = quantize_e4m3(values[:, None]).scale.double()
    least = values.double() <= 448 * scale
    assert least.all() and (values.double() > 448 * (scale / 2)).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(["ue8m0", "fp32"]))
def test_no_clamp_is_needed(value: float, scale_format: str) -> None:
    made = quantize_e4m3(torch.tensor([[value, 0.25 * value]]), scale_format)
    assert made.values.float().isfinite().all()
    bounded = max(abs(value), 1e-4)
    assert abs(float(made.scale)) * 448 >= bounded * (1 - 2**-23)


# amax, then the UE8M0 scale and the plain one.
AMAX_CASES = [(448.0, 1.0, 1.0), (449.0, 2.0, 449 / 448), (0.0, 2.0**-22, 1e-4 / 448), (1e-12, 2.0**-22, 1e-4 / 448)]
AMAX_CASES += [(3e38, 2.0 ** math.ceil(math.log2(3e38 / 448)), 3e38 / 448)]


@pytest.mark.parametrize(("amax", "power", "plain"), AMAX_CASES)
def test_the_two_scale_formats(amax: float, power: float, plain: float) -> None:
    x = torch.tensor([amax, -amax / 2, 0.0, -0.0])
    assert quantize_e4m3(x).scale.item() == power
    made = quantize_e4m3(x, "fp32")
    assert made.scale.item() == pytest.approx(plain, rel=1e-7)
    assert made.values.float().tolist()[:2] == ([448.0, -224.0] if amax > 1e-4 else [made.values.float()[0], -0.0])
    assert made.values.view(torch.uint8).tolist()[2:] == [0x00, 0x80]


def test_shapes_dtypes_and_empty_inputs() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        made = quantize_e4m3(torch.ones(3, 2, 128, dtype=dtype, requires_grad=True))
        assert made.values.shape == (3, 2, 128) and made.values.dtype == torch.float8_e4m3fn
        assert made.scale.shape == (3, 2) and made.scale.dtype == torch.float32
        assert not made.values.requires_grad and not made.scale.requires_grad
    assert quantize_e4m3(torch.empty(0, 128)).scale.shape == (0,)


def test_strided_input_gives_the_bytes_of_its_copy() -> None:
    q = golden("08")["q"].transpose(0, 1)
    made, plain = quantize_e4m3(q), quantize_e4m3(q.contiguous())
    assert torch.equal(bits(made.values), bits(plain.values)) and torch.equal(made.scale, plain.scale)


def test_the_checked_mode_raises_on_the_nonfinite_file() -> None:
    file = golden("12")
    assert file["bad_q"].any() and file["bad_k"].any()
    for name in ("q", "k"):
        with pytest.raises(ValueError, match="indexer vectors hold NaN or infinity"):
            quantize_e4m3(file[name], checked=True)
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_operands(operands("12"), checked=True)
    with pytest.raises(ValueError, match="NaN or infinity"):
        ReferenceBackend(fp8_config("12", fp8_check_finite=True)).select(operands("12"), layout("12"), 6)
    quantize_e4m3(golden("09")["q"], checked=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_one_bad_channel_poisons_its_vector_alone(bad: float, scale_format: str) -> None:
    x = torch.ones(3, 128)
    x[1, 77] = bad
    made = quantize_e4m3(x, scale_format)
    assert (made.values.view(torch.uint8)[1] == 0x7F).all() and made.scale[1].isnan()
    assert made.values[[0, 2]].float().isfinite().all() and made.scale[[0, 2]].isfinite().all()
    with pytest.raises(ValueError, match="1 of 3 indexer vectors"):
        quantize_e4m3(x, scale_format, checked=True)


def test_unknown_names_are_refused() -> None:
    x, indexer = torch.ones(2, 128), operands("08")
    with pytest.raises(ValueError, match="scale format 'fp16' is unknown"):
        quantize_e4m3(x, "fp16")
    with pytest.raises(ValueError, match="scale format 'fp32_q' is unknown"):
        quantize_operands(indexer, "fp32_q")
    with pytest.raises(ValueError, match="Scoring precision 'int8' is unknown"):
        to_scoring_precision(indexer, "int8")
    with pytest.raises(ValueError, match="dsa_indexer_fp8_scale_format='fp16' is unknown"):
        fp8_config("08", fp8_scale_format="fp16")


# ---- the choke point ----


def test_precision_is_the_type_of_the_operands() -> None:
    indexer = operands("09")
    assert to_scoring_precision(indexer, "fp32") is indexer
    rounded = to_scoring_precision(indexer, "bf16")
    assert isinstance(rounded, IndexerInputs) and rounded.q_TID.dtype == torch.float32
    assert torch.equal(rounded.q_TID, indexer.q_TID.bfloat16().float())
    assert rounded.w_TI is indexer.w_TI
    quantized = to_scoring_precision(indexer, "fp8")
    assert isinstance(quantized, QuantizedInputs)
    assert isinstance(quantized.q_TID, Quantized) and isinstance(quantized.k_SD, Quantized)


@pytest.mark.parametrize(
    ("scale_format", "q_format", "k_format"),
    [("ue8m0", "ue8m0", "ue8m0"), ("fp32", "fp32", "fp32"), ("fp32_k", "ue8m0", "fp32")],
)
def test_each_operand_gets_its_format_and_plain_key_scales_see_bf16(
    scale_format: str, q_format: str, k_format: str
) -> None:
    indexer = operands("09")
    made = to_scoring_precision(indexer, "fp8", scale_format)
    assert isinstance(made, QuantizedInputs)
    k = indexer.k_SD.bfloat16() if k_format == "fp32" else indexer.k_SD
    for got, expected in (
        (made.q_TID, quantize_e4m3(indexer.q_TID, q_format)),
        (made.k_SD, quantize_e4m3(k, k_format)),
    ):
        assert torch.equal(bits(got.values), bits(expected.values)) and torch.equal(got.scale, expected.scale)


def test_file_09_tells_fp32_operands_from_those_that_went_through_bf16() -> None:
    """The bytes and the set of the round trip are the file's too, and are not those of FP32."""
    file, indexer = golden("09"), operands("09")
    rounded = IndexerInputs(indexer.q_TID.bfloat16(), indexer.k_SD.bfloat16(), indexer.w_TI)
    made = quantize_operands(rounded)
    assert torch.equal(made.k_SD.values.view(torch.uint8), file["k_fp8_if_bf16"])
    assert 0.01 < float((file["k_fp8_if_bf16"] != file["k_fp8"]).float().mean()) < 0.1
    for carried, name in ((rounded, "topk_ids_if_bf16"), (indexer, "topk_ids")):
        topk = ReferenceBackend(fp8_config("09")).select(carried, layout("09"), file[name].shape[1])
        assert torch.equal(topk.indices_TK, file[name])
    assert not torch.equal(file["topk_ids_if_bf16"], file["topk_ids"])


def test_a_kernel_can_take_the_quantizers_place() -> None:
    calls = []

    def quantize(x: Tensor, scale_format: str, checked: bool) -> Quantized:
        calls.append((x.shape, scale_format, checked))
        return quantize_e4m3(x, scale_format, checked)

    indexer = operands("08")
    quantize_operands(indexer, "fp32_k", True, quantize)
    assert calls == [(indexer.q_TID.shape, "ue8m0", True), (indexer.k_SD.shape, "fp32", True)]


LAYOUTS = {
    "batch": [Layout.causal(2, 24)],
    "packed": [Layout.packed((0, 5, 12, 48))],
    "padded": [Layout.packed((0, 5, 12, 40), (0, 8, 16, 48))],
    "zigzag": [Layout.zigzag((0, 24, 48), 2, rank) for rank in range(2)],
    "rows": [Layout.causal(1, 48).slice_rows(0, 17), Layout.causal(1, 48).slice_rows(17, 48)],
}


@pytest.mark.parametrize("precision_name", ["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_choke_point(name: str, precision_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []

    def spy(*arguments: object) -> object:
        rounded = to_scoring_precision(*arguments)  # type: ignore[arg-type]
        kinds.append((arguments[1], type(rounded)))
        return rounded

    monkeypatch.setattr(reference, "to_scoring_precision", spy)
    indexer = operands("01")
    for shard in LAYOUTS[name]:
        rows = IndexerInputs(indexer.q_TID[: shard.num_rows], indexer.k_SD, indexer.w_TI[: shard.num_rows])
        ReferenceBackend(fp8_config("01", scoring_precision=precision_name)).select(rows, shard, 4)
    expected = QuantizedInputs if precision_name == "fp8" else IndexerInputs
    assert kinds and set(kinds) == {(precision_name, expected)}


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_rows", [1, 256])
def test_a_wide_carrier_is_rounded_to_bf16(
    carrier: torch.dtype, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_CHUNK_ROWS", chunk_rows)
    one = torch.zeros(4, 1, 128, dtype=carrier)
    one[..., 0] = 1.001
    indexer = IndexerInputs(one, one[:, 0], torch.ones(4, 1))
    config = fp8_config("08", scoring_precision="bf16", n_heads=1)
    topk = ReferenceBackend(config).select(indexer, Layout.causal(1, 4), 4)
    assert topk.scores_TK is not None
    assert topk.scores_TK.tril().eq(torch.ones(4, 4).tril()).all()


# ---- one set, however the rows are laid out ----


def _select(indexer: IndexerInputs, layout_: Layout) -> TopK:
    return ReferenceBackend(fp8_config("08")).select(indexer, layout_, 16)


def test_fp8_selects_the_same_keys_alone_packed_and_as_shards() -> None:
    indexer, other = operands("08"), operands("11")
    alone = _select(indexer, Layout.causal(1, 56)).indices_TK
    joined = IndexerInputs(*(torch.cat((a, b)) for a, b in zip(_parts(other), _parts(indexer), strict=True)))
    packed = _select(joined, Layout.packed((0, 48, 104))).indices_TK[48:]
    assert torch.equal(torch.where(packed < 0, -1, packed - 48), alone)
    for rank, rows in enumerate(([*range(14), *range(42, 56)], [*range(14, 42)])):
        shard = IndexerInputs(indexer.q_TID[rows], indexer.k_SD, indexer.w_TI[rows])
        assert torch.equal(_select(shard, Layout.zigzag((0, 56), 2, rank)).indices_TK, alone[rows])


def test_what_padding_holds_reaches_no_selection() -> None:
    indexer = operands("08")
    alone = _select(indexer, Layout.causal(1, 56)).indices_TK
    tail = IndexerInputs(*(torch.full((8, *x.shape[1:]), math.nan, dtype=x.dtype) for x in _parts(indexer)))
    joined = IndexerInputs(*(torch.cat((a, b)) for a, b in zip(_parts(indexer), _parts(tail), strict=True)))
    topk = _select(joined, Layout.packed((0, 56), (0, 64)))
    assert torch.equal(topk.indices_TK[:56], alone)
    assert (topk.indices_TK[56:] == -1).all() and (topk.length_T[56:] == 0).all()


def test_the_formats_select_differently() -> None:
    """The options are read: each format's scores differ from the others' on random data."""
    scores = [reference.score(quantize_operands(operands("09"), name)) for name in quantization.OPERAND_FORMATS]
    for i, first in enumerate(scores):
        assert all(not torch.equal(first, other) for other in scores[i + 1 :])


def _parts(indexer: IndexerInputs) -> tuple[Tensor, Tensor, Tensor]:
    return indexer.q_TID, indexer.k_SD, indexer.w_TI
