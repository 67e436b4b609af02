"""What is said before a run starts."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.core.models.gpt import build_gpt_model, get_preset
from megatron.core.parallel_state import ParallelSizes
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.training.prepare import backend_in_effect, indexer_imbalance

SHARING = {"dsa_indexer_topk_freq": [1, 1, 0, 1]}
OFF = {"dsa_indexer_loss_coeff": None, "dsa_indexer_use_sparse_loss": False, "dsa_indexer_topk_freq": 1}
DENSE = OFF | {"dsa_indexer_loss_coeff": 1.0}
SPARSE = DENSE | SHARING | {"dsa_indexer_use_sparse_loss": True, "dsa_indexer_scoring_precision": "fp32"}


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("none", DENSE, "the reference backend (scoring bf16, loss dense): layers that select keys 4, "),
        ("none", SPARSE, "the reference backend (scoring fp32, loss sparse): layers that select keys 3, "),
        (
            "cudnn",
            OFF,
            "the cudnn backend (scoring bf16, loss off): layers that select keys 4, layers that reuse them 0.",
        ),
        ("cudnn", DENSE | SHARING, "(scoring bf16, loss dense): layers that select keys 3, layers that reuse them 1."),
    ],
)
def test_the_backend_in_effect_is_said(
    backend: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudnnBackend, "unsupported", staticmethod(lambda config, device: None))
    config = replace(get_preset("tiny-glm5"), num_layers=4, dsa_kernel_backend=backend, **options)
    sentence = backend_in_effect(build_gpt_model(config, device="meta"))
    assert sentence.startswith("DSA runs on ") and said in sentence


def test_how_unevenly_the_indexer_is_shared_out() -> None:
    assert indexer_imbalance(65536, ParallelSizes(4, tensor=4)) == (
        "The indexer's rows are shared out over 4 tensor-parallel ranks in contiguous slices: in one causal document "
        "of 65536 tokens the busiest rank scores 7.0 times the pairs of the idlest and 1.75 times the mean."
    )


@pytest.mark.parametrize(
    ("length", "sizes", "said"),
    [
        (65536, ParallelSizes(2, tensor=2), "3.0 times the pairs of the idlest and 1.50 times the mean"),
        (65536, ParallelSizes(4, tensor=2, context=2), "7.0 times the pairs of the idlest and 1.75 times the mean"),
        (8, ParallelSizes(2, tensor=2), "2.6 times the pairs of the idlest and 1.44 times the mean"),
        (3, ParallelSizes(4, tensor=4), "scores 2.00 times the mean"),  # a rank holds padding alone
    ],
)
def test_imbalance_of_other_sizes(length: int, sizes: ParallelSizes, said: str) -> None:
    assert said in indexer_imbalance(length, sizes)
