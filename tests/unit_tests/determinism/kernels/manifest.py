"""Every kernel dispatch of the tree, with the test that replays it.

`python -m tests.unit_tests.determinism.kernels.manifest` compares this list with the source and names the tests to run
for what changed. Run them on a GPU (`pytest -m gpu tests/unit_tests/determinism`), then `... --rehash` writes the new
hashes into this file, and says once more which tests it takes to have passed. A new dispatch is written in by hand,
with its test. A hash covers the code of one file; what a library does is pinned by `TESTED_VERSIONS`.

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
# The libraries with which the replay tests last passed; a GPU test compares them with the installed ones.
TESTED_VERSIONS = {
    "torch": "2.11.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "sgl-flash-mla": "1.0.0",
}


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
        ("indexer_forward_wrapper",), "3e1e3dc2cc55", f"{REPLAY}::test_selection_and_its_scores"
    ),
    f"{FRONTEND}:top_k": Dispatch(("indexer_top_k_wrapper",), "99a73879bcc8", f"{REPLAY}::test_top_k_among_ties"),
    f"{FRONTEND}:flash_forward": Dispatch(
        ("flash_mla.flash_mla_sparse_fwd",), "6a6eb99a0765", f"{REPLAY}::test_attention_forward"
    ),
    f"{FRONTEND}:sparse_backward": Dispatch(
        ("sparse_attention_backward_wrapper",),
        "7784e37800ab",
        f"{REPLAY}::test_attention_backward_spread",
        exact=False,
        spread=4.0e-5,
    ),
    f"{FRONTEND}:sparse_target": Dispatch(
        ("sparse_attn_score_recompute_wrapper",), "df07bf34cbb2", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{FRONTEND}:dense_target": Dispatch(
        ("dense_attn_score_recompute_wrapper",), "9acfd17c4ba0", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{FRONTEND}:indexer_backward": Dispatch(
        ("indexer_backward_wrapper",),
        "e2d1cea94bb2",
        f"{REPLAY}::test_indexer_backward_spread",
        exact=False,
        spread=4.7e-5,
    ),
    f"{FRONTEND}:dense_indexer_backward": Dispatch(
        ("dense_indexer_backward_wrapper",),
        "1040a269aa79",
        f"{REPLAY}::test_indexer_backward_spread",
        exact=False,
        spread=3.1e-5,
    ),
    # ---- Triton kernels and their launches ----
    f"{TRITON}/quantize.py:quantize_e4m3": Dispatch(
        ("_quantize_kernel[grid]",), "7edde8628c23", f"{REPLAY}::test_quantization"
    ),
    f"{TRITON}/quantize.py:_quantize_kernel": Dispatch(("triton.jit",), "452b3fe1d85f", f"{REPLAY}::test_quantization"),
    f"{TRITON}/triton_lse.py:visible_lse": Dispatch(
        ("_lse_kernel[grid]",), "3b81f5921b64", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_lse.py:_lse_kernel": Dispatch(
        ("triton.jit",), "f8717544742c", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:kl_rows": Dispatch(
        ("_kl_kernel[grid]",), "2f78be823be2", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:_kl_kernel": Dispatch(
        ("triton.jit",), "b9a703be9322", f"{REPLAY}::test_teacher_and_loss"
    ),
    f"{TRITON}/triton_rows.py:backward_rows": Dispatch(
        ("_backward_kernel[grid]",), "d2af56138b05", f"{REPLAY}::test_indexer_backward_spread"
    ),
    f"{TRITON}/triton_rows.py:_backward_kernel": Dispatch(
        ("triton.jit",), "5aa8f3f6d449", f"{REPLAY}::test_indexer_backward_spread"
    ),
    # ---- grouped and fused products of PyTorch ----
    f"{MOE}/experts.py:grouped_linear": Dispatch(("grouped_mm",), "31cd1c380e21", f"{REPLAY}::test_grouped_products"),
    "megatron/core/transformer/dense_latent_attention.py:DenseLatentAttention._attend": Dispatch(
        ("scaled_dot_product_attention",), "a0827d1ea6d8", f"{REPLAY}::test_dense_attention"
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
        ("embedding",), "ec54dad97f11", TRAINING
    ),
    "megatron/core/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.forward": Dispatch(
        ("gather",), "95d68c2610aa", RANKS
    ),
    "megatron/core/tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.backward": Dispatch(
        ("scatter_add",), "d3cba3da5112", RANKS
    ),
    f"{MOE}/experts.py:GroupedMLP.forward": Dispatch(("scatter_",), "a39310a29597", TRAINING),
    f"{MOE}/experts.py:GroupedMLP._visit_experts": Dispatch(("cumsum",), "8d9edc3044a3", TRAINING),
    f"{MOE}/exchange.py:plan_exchange": Dispatch(("cumsum", "scatter_"), "8295efabd1e3", RANKS),
    f"{MOE}/load_balancing.py:sequence_balance_loss": Dispatch(("index_add_", "scatter_"), "b2a44aa68923", TRAINING),
    f"{MOE}/load_balancing.py:_documents": Dispatch(("cumsum",), "3f20648f90fe", TRAINING),
    f"{MOE}/moe_layer.py:_on_valid_rows": Dispatch(("index_copy",), "0bd2311826bc", TRAINING),
    f"{MOE}/router.py:TopKRouter.forward": Dispatch(("gather",), "64ca12a83a5b", TRAINING),
    f"{MOE}/router.py:TopKRouter._choose": Dispatch(("scatter_",), "4f2fefc7388e", TRAINING),
    f"{MOE}/router.py:count_experts": Dispatch(("scatter_add_",), "3268eb3a56c7", TRAINING),
    "megatron/training/attention_mass.py:attention_mass": Dispatch(("gather",), "a8ce2b6d496a", TRAINING),
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
# What else runs on the cudnn backend, and over ranks.
RUNTIME_OPERATORS_OF_KERNELS: dict[str, str] = {
    "_grouped_mm": "a tile has one writer; replayed",
    "index_select": "reads only",
}
RUNTIME_OPERATORS_OF_RANKS: dict[str, str] = {
    "index_put_": "each place is written once",
    "index_select": "reads only",
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


def replays_of_changes(manifest: dict[str, Dispatch], found: dict[str, Found]) -> list[str]:
    """The tests of entries whose hash is not the present one."""
    changed = {e.replay for where, e in manifest.items() if where in found and found[where].source != e.source}
    return sorted(f"tests/unit_tests/determinism/{test}" for test in changed)


def main() -> int:
    found = scan_tree()
    if "--rehash" in sys.argv[1:]:
        replays = replays_of_changes(MANIFEST, found)
        if replays:
            print("The new hashes say that these passed on a GPU with the present code; run them if they have not:")
            print(f"  pytest -m gpu {' '.join(replays)}")
        path = Path(__file__)
        path.write_text(rehash(path.read_text(encoding="utf-8"), MANIFEST, found), encoding="utf-8")
        return 0
    sentences = differences(MANIFEST, found)
    print("\n".join(sentences) or "The manifest describes the tree.")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
