"""Small corpora on disk, whose tokens say where they come from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.training.data.batch import SampleRules
from megatron.training.data.indexed import IndexedDatasetBuilder

EOD = 256
RULES = SampleRules(eod=EOD, vocab_size=100_000, reset_attention_mask=False, eod_mask_loss=False)
PACKED = SampleRules(eod=EOD, vocab_size=100_000, reset_attention_mask=True, eod_mask_loss=False)


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype: type = np.int32) -> str:
    """Write `documents`, one sequence each."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(np.array(document, dtype=np.int64))
    return str(prefix)


def numbered_documents(lengths: Sequence[int], first: int = 1000) -> list[list[int]]:
    """Documents of the given lengths in which no token occurs twice."""
    ends = np.cumsum(lengths)
    return [list(range(first + end - length, first + end)) for end, length in zip(ends, lengths, strict=True)]
