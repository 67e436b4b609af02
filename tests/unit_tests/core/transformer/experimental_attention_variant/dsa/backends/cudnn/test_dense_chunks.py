"""Which rows the dense loss takes at once: short documents together, long ones cut, padding at the ends left out."""

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TeacherChunk
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

from .. import cases
from ..cases import Case
from ..conftest import Stage
from ..test_backends import INDEXER_GRAD_TOLERANCE, run

BYTES_A_CELL_OF_A_CHUNK = 24


def teach(
    layout: Layout, cells: int, stage: Stage
) -> tuple[list[TeacherChunk], torch.Tensor, tuple[torch.Tensor, ...]]:
    """The chunks, the loss and the indexer's gradients with so many cells to a chunk."""
    case = Case("packed", "dense", 16, 32, 32, torch.bfloat16)
    backend = CudnnBackend(case.config(), cells * BYTES_A_CELL_OF_A_CHUNK)
    inputs = cases.make_inputs(layout, case, stage.device)
    topk = backend.select(inputs.indexer, layout, 32)
    attended, kl, grads = run(backend, inputs, topk, layout, "dense")
    return list(backend.teacher(inputs.attention, attended, topk, layout, True)), kl, grads[2:]


def test_short_documents_share_chunks(stage: Stage) -> None:
    """Each chunk costs a gradient of all rows, so documents must not each be one."""
    layout = Layout.packed(tuple(range(0, 321, 10)))
    chunks, kl, grads = teach(layout, 80 * 80, stage)
    assert [chunk.rows for chunk in chunks] == [(0, 80), (80, 160), (160, 240), (240, 320)]
    assert [chunk.keys for chunk in chunks] == [(0, 80), (80, 160), (160, 240), (240, 320)]
    alone, same_kl, same_grads = teach(layout, 100, stage)
    assert len(alone) == 32
    assert float(kl.detach()) == pytest.approx(float(same_kl.detach()), rel=1e-5)
    for one, other in zip(grads, same_grads, strict=True):
        assert cases.relative_error(one, other) < INDEXER_GRAD_TOLERANCE


def test_a_long_document_is_cut_and_its_neighbours_are_not(stage: Stage) -> None:
    layout = Layout.packed((0, 10, 20, 220, 230), (0, 16, 32, 240, 256))
    chunks, _, _ = teach(layout, 64 * 64, stage)
    assert [chunk.rows for chunk in chunks] == [(0, 26), (32, 96), (96, 160), (160, 224), (224, 232), (240, 250)]
    assert max(chunk.target_RN.numel() for chunk in chunks) <= 64 * 200
