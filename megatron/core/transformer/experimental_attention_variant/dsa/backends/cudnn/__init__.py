"""The backend called "cudnn": cuDNN Frontend's DSA kernels and FlashMLA, on Hopper.

Importing this package needs neither: the kernels are imported where they are called, and ``unsupported`` says, when a
module is built, whether they can be. From then on every layout and loss mode runs on them; nothing falls back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...config import DSAConfig
from ...layout import Layout
from ...loss import recomputed_later
from ..protocol import Attended, AttentionInputs, IndexerInputs, TeacherChunk, TopK
from . import capability, loss, topk
from .attention import attend
from .scoring import BYTE_BUDGET, scoring_operands


class CudnnBackend:
    """The four verbs of ``backends/protocol.py``.

    Args:
        config: checked options.
        byte_budget: bytes that one scoring call's scores and top-k scratch may take.
    """

    def __init__(self, config: DSAConfig, byte_budget: int = BYTE_BUDGET) -> None:
        self.config = config
        self.byte_budget = byte_budget

    @staticmethod
    def unsupported(config: DSAConfig, device: torch.device) -> str | None:
        """See ``capability.py``."""
        return capability.unsupported(config, device)

    def select(self, indexer: IndexerInputs, layout: Layout, k: int) -> TopK:
        trains = self.config.loss_enabled and torch.is_grad_enabled() and not recomputed_later()
        with torch.no_grad():
            operands = scoring_operands(indexer, self.config)
            return topk.select(operands, layout, k, trains and self.config.use_sparse_loss, self.byte_budget)

    def attend(self, attention: AttentionInputs, topk: TopK, layout: Layout) -> Attended:
        return attend(attention, topk, self.config.kv_lora_rank)

    @torch.no_grad()
    def teacher(
        self, attention: AttentionInputs, attended: Attended, topk: TopK, layout: Layout, dense: bool
    ) -> Iterator[TeacherChunk]:
        ranks = self.config.tensor_model_parallel_size
        if dense:
            yield from loss.dense_teacher(attention, layout, ranks, self.byte_budget)
        else:
            yield loss.sparse_teacher(attention, attended, topk, layout.num_rows // ranks)

    def indexer_loss(
        self, indexer: IndexerInputs, targets: Iterable[TeacherChunk], topk: TopK, layout: Layout, dense: bool
    ) -> Tensor:
        if recomputed_later():
            return loss.no_loss(indexer, topk, dense)
        if dense:
            return loss.dense_loss(indexer, targets, layout)
        (target,) = targets
        return loss.sparse_loss(indexer, target, topk, self._selected_scores(indexer, topk, layout))

    @torch.no_grad()
    def _selected_scores(self, indexer: IndexerInputs, selected: TopK, layout: Layout) -> Tensor:
        if selected.scores_TK is not None:
            return selected.scores_TK
        return topk.scores_of(scoring_operands(indexer, self.config), layout, selected.indices_TK, self.byte_budget)
