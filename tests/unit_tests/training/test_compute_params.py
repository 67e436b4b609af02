"""BF16 compute on FP32 parameters: what computes in which type, and where gradients end up."""

import pytest
import torch

from megatron.training.compute_params import ComputeParams, as_fp32
from tests.unit_tests.training.models import CONFIG, build


def bf16_model(**options: object) -> tuple[torch.nn.Module, ComputeParams]:
    model = as_fp32(build(bf16=True, **options))
    return model, ComputeParams(model, torch.bfloat16, model.config.computes_in_fp32)


def loss_of(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], labels=tokens[:, 1:]).mean()


def dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("k_norm_fp32", [False, True])
def test_parameters_are_fp32_outside_and_bf16_inside_but_for_the_islands(k_norm_fp32: bool) -> None:
    model, compute = bf16_model(dsa_indexer_k_norm_fp32=k_norm_fp32)
    assert set(dtypes(model).values()) == {torch.float32}
    before = list(model.named_parameters())
    with compute.installed():
        fp32 = {name.split(".", 4)[-1] for name, dtype in dtypes(model).items() if dtype == torch.float32}
    k_norm = {"core_attention.indexer.k_norm.weight", "core_attention.indexer.k_norm.bias"}
    assert fp32 == {"router.weight"} | (k_norm if k_norm_fp32 else set())
    assert all(a is b for (_, a), (_, b) in zip(before, model.named_parameters(), strict=True))


def test_a_step_smaller_than_a_bf16_ulp_survives() -> None:
    model, compute = bf16_model()
    weight = model.decoder.final_layernorm.weight
    with torch.no_grad():
        weight.fill_(1 + 2**-9)
    for _ in range(2):
        with compute.installed():
            assert model.decoder.final_layernorm.weight[0].item() == 1
        with torch.no_grad():
            weight.add_(2**-9)
    assert weight[0].item() == 1 + 3 * 2**-9
    with compute.installed():
        assert model.decoder.final_layernorm.weight[0].item() == 1 + 2**-7


@pytest.mark.parametrize("recompute", [None, "full"])
def test_gradients_are_those_of_a_bf16_model_added_up_in_fp32(recompute: str | None) -> None:
    model, compute = bf16_model(recompute_granularity=recompute)
    plain = build(bf16=True, recompute_granularity=recompute)
    expected: dict[str, torch.Tensor] = {}
    with compute.installed():
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            compute.accumulate()
            plain.zero_grad(set_to_none=True)
            reference = loss_of(plain, seed)
            reference.backward()
            assert torch.equal(loss, reference)
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    expected[name] = expected.get(name, 0.0) + parameter.grad.float()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_shared_weight_has_one_copy() -> None:
    model, compute = bf16_model(untie_embeddings_and_output_weights=False)
    with compute.installed():
        loss_of(model).backward()
        compute.accumulate()
    assert "embedding.word_embeddings.weight" in dict(model.named_parameters())
    assert model.embedding.word_embeddings.weight.grad.abs().sum() > 0


def test_the_parameters_come_back_after_an_error() -> None:
    model, compute = bf16_model()
    with pytest.raises(RuntimeError, match="halfway"), compute.installed():
        raise RuntimeError("halfway")
    assert set(dtypes(model).values()) == {torch.float32}


def test_fp32_compute_changes_nothing() -> None:
    model = build()
    compute = ComputeParams(model, torch.float32, CONFIG.computes_in_fp32)
    with compute.installed():
        loss = loss_of(model)
        loss.backward()
    compute.accumulate()
    assert model.output_layer.weight.grad is not None
