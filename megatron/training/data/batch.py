"""From a window of tokens to a sample, and from samples to a micro-batch.

A sample is `seq_length` tokens and, shifted by one, their labels. Documents lie back to back in it; a document longer
than the window, or one that begins near its end, is cut and goes on in another sample.

Two layouts. Plain: `[b, s]`, tokens see earlier documents of their sample. Packed (`reset_attention_mask`): the
micro-batch becomes ONE row `[1, b * s]` whose documents are listed in `PackedSeqParams`, so that none sees another;
a sample's beginning starts a document too. There the last token of a document has no target of its own (the next token
belongs to a stranger), so its loss is masked. Offsets stay host integers from here to the kernels.

A document starts where the index file says so and after every end-of-document token: files made by other tools hold
several documents in one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams


class Sample(NamedTuple):
    """One sample: tokens and labels int64 `[s]`, loss_mask float32 `[s]`, and where documents start (packed only)."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray | None


@dataclass(frozen=True)
class Batch:
    """One micro-batch: tokens and labels int64, loss_mask float32, all `[b, s]`, or `[1, b * s]` when packed."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams | None

    def to(self, device: torch.device | str) -> Batch:
        """The same micro-batch on `device`, host offsets included; does not wait for the device."""
        packed = self.packed_seq_params
        if packed is not None:
            tensors = {name: value for name, value in vars(packed).items() if isinstance(value, Tensor)}
            moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
            packed = replace(packed, **moved)
        tokens, labels, loss_mask = (
            tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.labels, self.loss_mask)
        )
        return Batch(tokens, labels, loss_mask, packed)


@dataclass(frozen=True)
class SampleRules:
    """What turns a window of tokens into a sample; the same for files and for synthetic data."""

    eod: int | None
    vocab_size: int
    reset_attention_mask: bool
    eod_mask_loss: bool

    def sample(self, window: np.ndarray, starts: np.ndarray, source: str) -> Sample:
        """Make a sample of `window`, int64 `[s + 1]`; `starts` marks, bool `[s + 1]`, the first token of documents.

        Raises:
            ValueError: `source` holds a token that the tokenizer does not have.
        """
        if window.min() < 0 or window.max() >= self.vocab_size:
            stray = int(window.min() if window.min() < 0 else window.max())
            raise ValueError(
                f"{source} holds the token {stray}, but the tokenizer has ids 0 to {self.vocab_size - 1}: give the "
                "--tokenizer-type and --tokenizer-model that the data were made with."
            )
        tokens, labels = window[:-1], window[1:]
        loss_mask = np.ones(len(tokens), dtype=np.float32)
        if self.eod_mask_loss:
            loss_mask[tokens == self.eod] = 0
        if not self.reset_attention_mask:
            return Sample(tokens, labels, loss_mask, None)
        starts = starts.copy()
        starts[0] = True
        if self.eod is not None:
            starts[1:] |= tokens == self.eod
        loss_mask[starts[1:]] = 0
        return Sample(tokens, labels, loss_mask, np.flatnonzero(starts[:-1]))


def collate(samples: Sequence[Sample]) -> Batch:
    """Make one micro-batch of `samples`, which are all plain or all packed."""
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    labels = torch.from_numpy(np.stack([sample.labels for sample in samples]))
    loss_mask = torch.from_numpy(np.stack([sample.loss_mask for sample in samples]))
    if samples[0].starts is None:
        return Batch(tokens, labels, loss_mask, None)
    offsets: list[int] = []
    for row, sample in enumerate(samples):
        assert sample.starts is not None
        offsets.extend((row * tokens.shape[1] + sample.starts).tolist())
    offsets.append(tokens.numel())
    packed = PackedSeqParams.from_offsets(offsets)
    return Batch(tokens.view(1, -1), labels.view(1, -1), loss_mask.view(1, -1), packed)
