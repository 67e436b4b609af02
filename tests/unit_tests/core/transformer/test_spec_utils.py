"""Specs build what they say."""

from __future__ import annotations

import pytest
from torch import nn

from megatron.core.transformer.spec_utils import ModuleSpec, build_module


class Part(nn.Module):
    def __init__(self, width: int, scale: float = 1.0, submodules: object = None) -> None:
        super().__init__()
        self.width, self.scale, self.submodules = width, scale, submodules


def test_a_class_is_called() -> None:
    assert build_module(Part, 3, scale=2.0).scale == 2.0


def test_a_spec_adds_its_parameters_and_parts_and_the_caller_wins() -> None:
    parts = object()
    spec = ModuleSpec(Part, params={"scale": 2.0}, submodules=parts)
    built = build_module(spec, width=3)
    assert (built.width, built.scale, built.submodules) == (3, 2.0, parts)
    assert build_module(spec, 3, scale=5.0, submodules=None).scale == 5.0
    assert build_module(spec, 3, submodules=None).submodules is None


def test_a_spec_without_parts_hands_over_none() -> None:
    assert build_module(ModuleSpec(nn.Linear), 2, 3).out_features == 3


def test_wrong_arguments_name_the_class() -> None:
    with pytest.raises(TypeError, match="Part"):
        build_module(ModuleSpec(Part), width=3, height=4)
