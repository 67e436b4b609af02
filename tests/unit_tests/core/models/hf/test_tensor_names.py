"""The table of names covers the golden files exactly; every slot is its own part of our tensors."""

import pytest
import torch

from megatron.core.models.hf.config_import import config_from_hf
from megatron.core.models.hf.tensor_names import Slot, tensor_slots
from tests.unit_tests.core.models.hf.golden import NAMES, hf_config, tensors


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_file(name: str) -> None:
    slots = list(tensor_slots(config_from_hf(hf_config(name))))
    assert {slot.hf for slot in slots} == tensors(name, "model").keys()
    assert len({slot.hf for slot in slots}) == len(slots) == len({(slot.ours, slot.index) for slot in slots})


def test_shared_layers_have_no_indexer() -> None:
    names = [slot.hf for slot in tensor_slots(config_from_hf(hf_config("b_glm_indexshare")))]
    owners = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert owners == {0, 1, 4}


def test_tied_models_have_no_lm_head() -> None:
    hf = hf_config("a_glm_plain")
    tied = {slot.hf for slot in tensor_slots(config_from_hf(hf | {"tie_word_embeddings": True}))}
    assert {slot.hf for slot in tensor_slots(config_from_hf(hf))} - tied == {"lm_head.weight"}


def test_parts_are_views() -> None:
    whole = torch.zeros(3, 2, 5, 4)
    Slot("x", "y", (1, 0)).part(whole).fill_(1)
    Slot("x", "y", (2, 1), rows=2).part(whole).fill_(2)
    assert whole[1, 0].eq(1).all() and whole[2, 1, :2].eq(2).all()
    assert whole.sum() == 20 + 2 * 8
