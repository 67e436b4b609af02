"""What is said before a run starts."""

import pytest

from megatron.core.parallel_state import ParallelSizes
from megatron.training.prepare import indexer_imbalance


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
