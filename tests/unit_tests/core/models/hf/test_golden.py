"""Our FP32 model against transformers 5.24.0 on the golden models: every number inside, and every gradient."""

from functools import cache

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf import from_pretrained
from megatron.core.models.hf.tensor_names import tensor_slots
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, load_meta, tensors
from tests.unit_tests.core.models.hf.observe import as_batch, as_packed, differences, golden_sets, run


@cache
def load(name: str) -> GPTModel:
    """Do not change it."""
    return from_pretrained(FIXTURES / name).eval()


@pytest.mark.parametrize("name", NAMES)
def test_everything_inside_is_what_transformers_computes(name: str) -> None:
    golden = golden_sets(tensors(name, "outputs"))
    values = run(load(name), as_batch(tensors(name, "inputs")["input_ids"]))
    assert values.keys() == golden.keys()
    assert differences(values, golden) == {}


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_batch_as_one_packed_row(name: str, pad: int) -> None:
    input_ids = tensors(name, "inputs")["input_ids"]
    packed = run(load(name), as_packed(input_ids, pad))
    assert differences(packed, golden_sets(tensors(name, "outputs"))) == {}


def test_golden_rows_are_truncated() -> None:
    """A selection of all visible keys proves nothing, so most rows must see more keys than they select."""
    for name in NAMES[:3]:
        sizes = golden_sets(tensors(name, "outputs"))["selected.0"].sum(-1)
        visible = torch.arange(1, sizes.shape[1] + 1)
        assert (sizes < visible).float().mean() > 0.7


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_language_model_loss(name: str, recompute: str | None) -> None:
    model = from_pretrained(FIXTURES / name, dsa_indexer_loss_coeff=0.0, recompute_granularity=recompute)
    input_ids = tensors(name, "inputs")["input_ids"]
    labels = torch.full_like(input_ids, -100)
    labels[:, :-1] = input_ids[:, 1:]
    loss = model(input_ids, labels=labels).sum() / labels.ge(0).sum()
    loss.backward()
    assert abs(loss.item() - load_meta(name)["loss"]) < 1e-5

    parameters = dict(model.named_parameters())
    slots = {slot.hf: slot for slot in tensor_slots(model.config)}
    golden = tensors(name, "grads")
    wrong = {}
    for hf_name, expected in golden.items():
        gradient = parameters[slots[hf_name].ours].grad
        assert gradient is not None, hf_name
        off = (slots[hf_name].part(gradient) - expected).abs().max()
        if not off <= 1e-3 * expected.abs().max():  # an expert without tokens has exactly no gradient
            wrong[hf_name] = float(off)
    assert wrong == {}
    without = {slot.ours for slot in slots.values() if slot.hf not in golden}
    assert all(".indexer." in ours or ours.endswith(".expert_bias") for ours in without)
    assert all(parameters[ours].grad is None for ours in without if ours in parameters)
