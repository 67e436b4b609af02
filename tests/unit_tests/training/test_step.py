"""One step: how losses are normalized, that nothing depends on how a batch is cut, and what stops it."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker
from megatron.training import step
from megatron.training.attention_mass import MassProbe
from megatron.training.compute_params import ComputeParams
from megatron.training.config import OptimizerConfig
from megatron.training.data.batch import Batch, Sample, collate
from megatron.training.flops import Workload
from megatron.training.optimizer import build_optimizer
from megatron.training.step import Engine, NonFiniteError, document_lengths, evaluate, train_step, workload
from tests.unit_tests.training.models import build

INDEXER = "decoder.layers.0.self_attention.core_attention.indexer"
# Weights large enough for index scores, and so for the indexer loss, to differ from nothing.
EXACT = {"dsa_indexer_scoring_precision": "fp32", "init_method_std": 0.2}


def engine_of(clip_grad: float = 0.0, **options: object) -> Engine:
    model = build(**EXACT, **options)
    config = OptimizerConfig(lr=1.0, clip_grad=clip_grad)
    per_token = model.config.calculate_per_token_loss
    compute = ComputeParams(model, torch.float32, lambda name: False)
    return Engine(model, compute, build_optimizer(model, config), torch.device("cpu"), config, per_token, True)


def sample(seed: int, length: int = 12, loss_tokens: int | None = None, starts: Sequence[int] | None = None) -> Sample:
    tokens = np.random.default_rng(seed).integers(0, 50, length + 1)
    mask = np.zeros(length, dtype=np.float32)
    mask[:loss_tokens] = 1
    return Sample(tokens[:-1], tokens[1:], mask, None if starts is None else np.array(starts))


def cut(samples: list[Sample], micro: int) -> list[Batch]:
    return [collate(samples[i : i + micro]) for i in range(0, len(samples), micro)]


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per-microbatch", "per-token"])
def test_gradients_and_figures_do_not_depend_on_the_micro_batch_size(per_token: bool, packed: bool) -> None:
    starts = [0, 5] if packed else None
    samples = [sample(seed, starts=starts) for seed in range(8)]
    engine = engine_of(calculate_per_token_loss=per_token, moe_router_bias_update_rate=0.0)
    expected = train_step(engine, cut(samples, 8), 0.0)
    expected_gradients = gradients(engine)
    assert any(name.startswith(INDEXER) for name in expected_gradients)
    for micro in (1, 2, 4):
        result = train_step(engine, cut(samples, micro), 0.0)
        assert_close(gradients(engine), expected_gradients)
        assert result.lm_loss == pytest.approx(expected.lm_loss, rel=1e-5)
        assert result.indexer_losses == pytest.approx(expected.indexer_losses, rel=1e-5)


def test_uneven_loss_masks_count_tokens_or_micro_batches() -> None:
    samples = [sample(0, loss_tokens=2), sample(1, loss_tokens=12)]
    for per_token, weights in ((True, (1 / 14, 1 / 14)), (False, (1 / 4, 1 / 24))):
        engine = engine_of(calculate_per_token_loss=per_token)
        losses = []
        for batch in cut(samples, 1):
            per_row = engine.model(batch.tokens, labels=batch.labels, losses=LossTracker())
            losses.append((per_row * batch.loss_mask).sum().item())
        result = train_step(engine, cut(samples, 1), 0.0)
        assert result.lm_loss == pytest.approx(sum(w * loss for w, loss in zip(weights, losses, strict=True)), rel=1e-5)


BALANCED = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}


@pytest.mark.parametrize("per_token", [False, True], ids=["per-microbatch", "per-token"])
@pytest.mark.parametrize("micro", [1, 2])
def test_side_losses_are_means_over_rows_whatever_the_loss_mask(per_token: bool, micro: int) -> None:
    samples = [sample(0, loss_tokens=3), sample(1, loss_tokens=9)]
    engine = engine_of(calculate_per_token_loss=per_token, **BALANCED)
    kl_sum = balance_sum = 0.0
    for batch in cut(samples, 1):
        tracker = LossTracker()
        engine.model.train()(batch.tokens, labels=batch.labels, losses=tracker)
        kl_sum += tracker.kl_sums[1].item()
        balance_sum += tracker.balance_sums[2].item()
    result = train_step(engine, cut(samples, micro), 0.0)
    assert result.indexer_losses == {1: pytest.approx(kl_sum / 24, rel=1e-5)}
    assert result.balance_losses == {2: pytest.approx(balance_sum / 24, rel=1e-5)}
    assert 1 <= result.balance_losses[2] < 4 and result.indexer_losses[1] > 1e-3


def test_without_a_balance_loss_there_is_no_figure_of_it() -> None:
    assert train_step(engine_of(), cut([sample(0)], 1), 0.0).balance_losses == {}


@pytest.mark.parametrize("per_token", [False, True], ids=["per-microbatch", "per-token"])
def test_loss_tokens_are_counted_over_ranks_only_where_they_are_read(
    per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting them makes the host wait for the device."""
    engine, sent = engine_of(calculate_per_token_loss=per_token), []
    monkeypatch.setattr(step, "group_size", lambda group: 2 if group == "dp" else 1)
    monkeypatch.setattr(step.dist, "all_reduce", lambda tensor, group: sent.append((tensor.item(), group)))
    engine.groups = ProcessGroupCollection(dp="dp")  # type: ignore[arg-type]
    train_step(engine, cut([sample(0, loss_tokens=3), sample(1)], 1), 0.0)
    assert sent == ([(15.0, "dp")] if per_token else [])


def test_a_batch_without_loss_tokens_divides_by_nothing() -> None:
    result = train_step(engine_of(), cut([sample(0, loss_tokens=0)], 1), 0.0)
    assert result.lm_loss == 0 and result.indexer_losses[1] > 0


def test_the_norm_is_logged_unclipped_and_the_step_is_clipped() -> None:
    free, clipped = engine_of(), engine_of(clip_grad=0.25)
    batches = cut([sample(0)], 1)
    expected, found = train_step(free, batches, 0.0), train_step(clipped, batches, 0.0)
    assert found.grad_norm == expected.grad_norm > 0.25
    for name, gradient in gradients(clipped).items():
        assert torch.allclose(gradient, gradients(free)[name] * 0.25 / expected.grad_norm, rtol=1e-4, atol=1e-8)


def test_the_expert_bias_moves_once_a_step_and_not_by_evaluation() -> None:
    engine = engine_of()
    router = engine.model.decoder.layers[1].mlp.router
    evaluate(engine, cut([sample(0), sample(1)], 1))
    assert router.expert_bias.abs().sum() == 0 and router.local_tokens_per_expert.sum() == 0
    train_step(engine, cut([sample(0), sample(1)], 1), 0.0)
    assert {round(abs(bias), 6) for bias in router.expert_bias.tolist()} in ({0.001}, {0.0, 0.001})
    assert router.local_tokens_per_expert.sum() == 0


@pytest.mark.parametrize("check", [True, False])
def test_a_figure_that_is_not_finite_stops_before_the_weights_change(check: bool) -> None:
    engine = engine_of()
    engine.check_finite = check
    with torch.no_grad():
        engine.model.output_layer.weight[3, 3] = float("inf")
    before = engine.model.embedding.word_embeddings.weight.clone()
    if check:
        with pytest.raises(NonFiniteError, match=r"^The LM loss is (nan|inf)$"):
            train_step(engine, cut([sample(0)], 1), 0.1)
        assert torch.equal(engine.model.embedding.word_embeddings.weight, before)
    else:
        train_step(engine, cut([sample(0)], 1), 0.1)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    engine = engine_of()
    engine.model.embedding.word_embeddings.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match="^The gradient norm is nan$"):
        train_step(engine, cut([sample(0)], 1), 0.1)


def test_evaluation_is_the_mean_over_loss_tokens_and_trains_nothing() -> None:
    engine, probe = engine_of(), MassProbe(4)
    samples = [sample(0, loss_tokens=2), sample(1, loss_tokens=12)]
    loss, masses = evaluate(engine, iter(cut(samples, 1)), probe)
    whole, _ = evaluate(engine, cut(samples, 2))
    per_token = train_step(engine_of(calculate_per_token_loss=True), cut(samples, 1), 0.0).lm_loss
    assert loss == pytest.approx(whole, rel=1e-6) and loss == pytest.approx(per_token, rel=1e-5)
    assert set(masses) == {1, 2}
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_lengths_and_work_of_batches() -> None:
    plain, packed = cut([sample(0), sample(1)], 2)[0], collate([sample(0, starts=[0, 5]), sample(1, starts=[0])])
    assert document_lengths(plain) == [12, 12]
    assert document_lengths(packed) == [5, 7, 12]
    assert workload([plain, packed], 4) == Workload.of([12, 12, 5, 7, 12], 4)


def test_step_results_are_plain_numbers() -> None:
    result = train_step(engine_of(), cut([sample(0)], 1), 0.0, MassProbe(4))
    for value in dataclasses.asdict(result).values():
        assert isinstance(value, float | dict)
    assert set(result.attention_mass) == {1, 2}
