"""The dense core against a masked softmax over all keys, for every kind of layout that one rank can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.dense_latent_attention import DenseLatentAttention
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, row_bounds
from tests.unit_tests.core.tiny_model import context_of, tiny_config

LAYOUTS = {
    "batch": Layout.causal(2, 5),
    "packed": Layout.packed((0, 4, 4, 5, 11)),
    "padded": Layout.packed((0, 3, 7), padded_offsets=(0, 6, 12)),
    "rows-of-a-slice": Layout.packed((0, 4, 11)).slice_rows(2, 9),
    "zigzag": Layout.zigzag((0, 8, 15), 2, 1, padded_offsets=(0, 8, 16)),
    "all-padding": Layout.packed((0, 0), padded_offsets=(0, 4)),
}


def attend_by_mask(query: Tensor, key: Tensor, up_v: Tensor, layout: Layout, scale: float) -> Tensor:
    starts, ends = row_bounds(layout, "cpu")
    ids = torch.arange(len(key))
    visible = (ids >= starts[:, None]) & (ids < ends[:, None])
    logits = torch.einsum("thd,sd->hts", query, key) * scale
    p = logits.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("hts,sl,hvl->thv", p, key[:, : up_v.shape[2]], up_v).flatten(1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_attention_is_a_masked_softmax(name: str) -> None:
    config, layout = tiny_config(experimental_attention_variant=None), LAYOUTS[name]
    core = DenseLatentAttention(config, layer_number=1, softmax_scale=0.3)
    query = torch.randn(layout.num_rows, 2, 16, dtype=torch.float64, requires_grad=True)
    key = torch.randn(layout.num_keys, 16, dtype=torch.float64, requires_grad=True)
    up_v = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    context = replace(context_of(1, layout.num_rows), layout=layout)
    actual = core(query, key, up_v_weight=up_v, context=context, x=None, qr=None)
    expected = attend_by_mask(query, key, up_v, layout, 0.3)
    torch.testing.assert_close(actual, expected)
    if layout.num_valid_rows:
        probe = torch.randn_like(actual)
        actual_gradients = torch.autograd.grad((actual * probe).sum(), (query, key, up_v))
        torch.testing.assert_close(actual_gradients, torch.autograd.grad((expected * probe).sum(), (query, key, up_v)))
