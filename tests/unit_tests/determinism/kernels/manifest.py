"""Every kernel dispatch of the tree, with the test that replays it.

`python -m tests.unit_tests.determinism.kernels.manifest` compares this list with the source and names the tests to run
for what changed. Run them on a GPU (`pytest -m gpu tests/unit_tests/determinism`), then `... --rehash` writes the new
hashes into this file. A new dispatch is written in by hand, with its test.

``exact``: bitwise equal on replay on SM 9.0, while another stream keeps the memory busy. What is not exact is listed
with the largest relative difference (norm of the difference over norm) that its test measured on an H200, None where
nobody has measured it yet; deterministic mode refuses it.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .dispatches import Found, scan_tree

REPLAY = "kernels/test_replay.py"
TRAINING = "test_training_twice.py::test_two_runs_are_equal"
RANKS = "test_ranks_twice.py::test_two_runs_over_two_ranks_are_equal"


@dataclass(frozen=True)
class Dispatch:
    """One function that dispatches.

    Attributes:
        calls: what it calls, as the scanner names it.
        source: hash of its code when the replay test last passed.
        replay: the test, relative to tests/unit_tests/determinism.
        exact: whether replays are bitwise equal.
        spread: largest relative difference measured, where not exact.
    """

    calls: tuple[str, ...]
    source: str
    replay: str
    exact: bool = True
    spread: float | None = None


FRONTEND, MOE = "dsa/backends/cudnn/frontend.py", "megatron/core/transformer/moe"
TRITON = "dsa/backends/cudnn"

MANIFEST: dict[str, Dispatch] = {
    # ---- library kernels ----
    f"{FRONTEND}:score_segments": Dispatch(
        ("indexer_forward_wrapper",), "c1df9bcb104b", f"{REPLAY}::test_selection_and_its_scores"
    ),
    f"{FRONTEND}:top_k": Dispatch(("indexer_top_k_wrapper",), "71d47a390712", f"{REPLAY}::test_top_k_among_ties"),
    f"{FRONTEND}:flash_forward": Dispatch(
        ("flash_mla.flash_mla_sparse_fwd",), "b32ea72cbf3d", f"{REPLAY}::test_attention_forward"
    ),
    f"{FRONTEND}:sparse_backward": Dispatch(
        ("sparse_attention_backward_wrapper",), "cdfffe9c7c8e", f"{REPLAY}::test_attention_backward_spread", exact=False
    ),
    f"{FRONTEND}:sparse_target": Dispatch(
        ("sparse_attn_score_recompute_wrapper",), "6ff8afc49258", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{FRONTEND}:dense_target": Dispatch(
        ("dense_attn_score_recompute_wrapper",), "c63da284abe5", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{FRONTEND}:indexer_backward": Dispatch(
        ("indexer_backward_wrapper",), "0a635f57234c", f"{REPLAY}::test_indexer_backward_spread", exact=False
    ),
    f"{FRONTEND}:dense_indexer_backward": Dispatch(
        ("dense_indexer_backward_wrapper",), "88c02755828e", f"{REPLAY}::test_indexer_backward_spread", exact=False
    ),
    # ---- Triton kernels and their launches ----
    f"{TRITON}/quantize.py:quantize_e4m3": Dispatch(
        ("_quantize_kernel[grid]",), "6961a0ce4daf", f"{REPLAY}::test_quantization"
    ),
    f"{TRITON}/quantize.py:_quantize_kernel": Dispatch(("triton.jit",), "452b3fe1d85f", f"{REPLAY}::test_quantization"),
    f"{TRITON}/triton_lse.py:visible_lse": Dispatch(
        ("_lse_kernel[grid]",), "f82491d1b06e", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_lse.py:_lse_kernel": Dispatch(
        ("triton.jit",), "03b0d60ec72d", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:kl_rows": Dispatch(
        ("_kl_kernel[grid]",), "bd23bc03fe68", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:_kl_kernel": Dispatch(
        ("triton.jit",), "5c684783a3ff", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:backward_rows": Dispatch(
        ("_backward_kernel[grid]",), "b00d8e6b79c9", f"{REPLAY}::test_indexer_backward_spread"
    ),
    f"{TRITON}/triton_rows.py:_backward_kernel": Dispatch(
        ("triton.jit",), "29d5def6492a", f"{REPLAY}::test_indexer_backward_spread"
    ),
    # ---- gathers and scatters ----
    f"{TRITON}/scoring.py:_take": Dispatch(
        ("index_select",), "210472ebdad3", f"{REPLAY}::test_scores_of_a_replayed_selection"
    ),
    f"{TRITON}/topk.py:scores_of": Dispatch(
        ("gather",), "de8b4ce57637", f"{REPLAY}::test_scores_of_a_replayed_selection"
    ),
    "dsa/reference.py:select": Dispatch(("gather",), "e1612aa2c7c3", TRAINING),
    "dsa/reference.py:selected_mask": Dispatch(("scatter_",), "c64a6ac91358", TRAINING),
    "dsa/reference.py:_pick": Dispatch(("gather",), "58f232b58e1f", TRAINING),
    "megatron/core/tensor_parallel/layers.py:VocabParallelEmbedding.forward": Dispatch(
        ("embedding",), "b0d17ba58555", TRAINING
    ),
    "megatron/core/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.forward": Dispatch(
        ("gather",), "f33b65c71151", RANKS
    ),
    "megatron/core/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.backward": Dispatch(
        ("scatter_add",), "d3cba3da5112", RANKS
    ),
    f"{MOE}/experts.py:GroupedMLP.forward": Dispatch(("scatter_",), "0d2dc7f25bf8", TRAINING),
    f"{MOE}/experts.py:GroupedMLP._visit_experts": Dispatch(("cumsum",), "f4df2c86b192", TRAINING),
    f"{MOE}/exchange.py:plan_exchange": Dispatch(("cumsum", "scatter_"), "93914aa3f1f0", RANKS),
    f"{MOE}/load_balancing.py:sequence_balance_loss": Dispatch(("index_add_", "scatter_"), "ab1ab26d7bd1", TRAINING),
    f"{MOE}/load_balancing.py:_documents": Dispatch(("cumsum",), "02c2ba0d5164", TRAINING),
    f"{MOE}/moe_layer.py:_on_valid_rows": Dispatch(("index_copy",), "0bd2311826bc", TRAINING),
    f"{MOE}/router.py:TopKRouter.forward": Dispatch(("gather",), "0f777b273b95", TRAINING),
    f"{MOE}/router.py:TopKRouter._choose": Dispatch(("scatter_",), "4f2fefc7388e", TRAINING),
    f"{MOE}/router.py:count_experts": Dispatch(("scatter_add_",), "3268eb3a56c7", TRAINING),
    "megatron/training/dsa_health.py:attention_mass": Dispatch(("gather",), "3599999f1398", TRAINING),
}

# Operators with an order of sums that a training step really runs, by PyTorch's names, and why a rerun repeats them.
RUNTIME_OPERATORS: dict[str, str] = {
    "cumsum": "of integers, exact in any order",
    "embedding": "reads only",
    "embedding_dense_backward": "sorts the ids first",
    "gather": "reads only",
    "index": "reads only",
    "index_add_": "of counts, exact in any order",
    "index_put": "sorts in deterministic mode",
    "scatter_": "each place is written once",
    "scatter_add": "sorts in deterministic mode",
    "scatter_add_": "of integers, exact in any order",
}


def differences(manifest: dict[str, Dispatch], found: dict[str, Found]) -> list[str]:
    """One sentence for every dispatch that the manifest lacks, invents or describes as it no longer is."""
    sentences = []
    for where in sorted(manifest.keys() | found.keys()):
        listed, present = manifest.get(where), found.get(where)
        if listed is None and present is not None:
            calls = ", ".join(present.calls)
            sentences.append(
                f"{where} dispatches {calls}, but is not in the manifest: write its replay test, then add it."
            )
        elif present is None:
            sentences.append(f"{where} is in the manifest, but dispatches nothing (any more): take it out.")
        elif listed is not None and listed.calls != present.calls:
            sentences.append(
                f"{where} dispatches {present.calls}, not {listed.calls}: check its replay test, correct it."
            )
        elif listed is not None and listed.source != present.source:
            sentences.append(f"{where} changed ({listed.source} -> {present.source}): run {listed.replay} and rehash.")
    return sentences


def rehash(text: str, manifest: dict[str, Dispatch], found: dict[str, Found]) -> str:
    """This file with the present hashes; entries are told apart by their order."""
    hashes = iter(found[where].source if where in found else entry.source for where, entry in manifest.items())
    head, mark, rest = text.partition("MANIFEST: dict[str, Dispatch] = {")
    body, end, tail = rest.partition("\n}\n")
    return head + mark + re.sub(r'"(?:[0-9a-f]{12}|\?)"', lambda _: f'"{next(hashes)}"', body) + end + tail


def main() -> int:
    found = scan_tree()
    if "--rehash" in sys.argv[1:]:
        path = Path(__file__)
        path.write_text(rehash(path.read_text(encoding="utf-8"), MANIFEST, found), encoding="utf-8")
        return 0
    sentences = differences(MANIFEST, found)
    print("\n".join(sentences) or "The manifest describes the tree.")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
