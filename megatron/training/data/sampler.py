"""The micro-batches of one data-parallel rank, from a given position on.

Samples are dealt out in rounds of `micro_batch_size * dp_size`, of which rank r takes the r-th `micro_batch_size`. So a
global batch holds the same samples however it is split into micro-batches and ranks, and the number of consumed samples
is all there is to save. What is left at the end and fills no round is dropped.

Readers in other processes (`num_workers`) change when a sample is read and nothing else, not even the state of torch's
random numbers, which a DataLoader would draw from. They ignore SIGTERM and SIGINT: schedulers send these to the whole
process group, and the training process has a checkpoint to write first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from megatron.training.data.batch import Batch, collate
from megatron.training.data.build import SampleDataset


def _ignore_signals(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def batches(
    dataset: SampleDataset,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Iterate over the micro-batches of rank `dp_rank`, beginning after `consumed_samples` samples of all ranks.

    Raises:
        ValueError: the position lies past the dataset's end.
    """
    assert micro_batch_size > 0 and 0 <= dp_rank < dp_size
    stride = micro_batch_size * dp_size
    if not 0 <= consumed_samples <= len(dataset):
        raise ValueError(
            f"{consumed_samples} samples are already consumed, but the run has only {len(dataset)}: raise "
            "--train-iters, or start afresh without --load."
        )
    starts = range(consumed_samples, len(dataset) - stride + 1, stride)
    own = range(dp_rank * micro_batch_size, (dp_rank + 1) * micro_batch_size)
    rounds = ([start + place for place in own] for start in starts)
    if num_workers == 0:
        return (collate([dataset[index] for index in indices]) for indices in rounds)
    return iter(
        DataLoader(
            dataset,
            batch_sampler=rounds,
            collate_fn=collate,
            num_workers=num_workers,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),
        )
    )
