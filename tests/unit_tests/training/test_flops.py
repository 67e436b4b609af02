"""FLOPs against counts by hand, and the parts that must and must not count."""

import dataclasses

import pytest

from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.flops import Workload, training_flops

# h 6, H 2, n 3, r 2, v 5, a 4, c 7, dense ffn 11; one layer; vocabulary 10; indexer I 3 x D 4, top-k 2.
CONFIG = MLATransformerConfig(
    num_layers=1,
    hidden_size=6,
    num_attention_heads=2,
    ffn_hidden_size=11,
    vocab_size=10,
    make_vocab_size_divisible_by=1,
    gated_linear_unit=True,
    activation_func="silu",
    add_bias_linear=False,
    q_lora_rank=4,
    kv_lora_rank=7,
    qk_head_dim=3,
    qk_pos_emb_head_dim=2,
    v_head_dim=5,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=3,
    dsa_indexer_head_dim=4,
    dsa_indexer_topk=2,
)
# Documents of 3 and 1 tokens: rows see 1, 2, 3 and 1 keys, and select 1, 2, 2 and 1.
WORK = Workload.of([3, 1], topk=2)

PROJECTIONS = 6 * 4 + 4 * 2 * 5 + 6 * 9 + 2 * 3 * 7 + 2 * 7 * 5 + 2 * 5 * 6
BACKBONE = 3 * (4 * (PROJECTIONS + 3 * 6 * 11 + 6 * 10) + 6 * 2 * (7 + 2 + 7))
INDEXER_PROJECTIONS = 4 * 3 * 4 + 6 * 4 + 6 * 3


def test_pairs_of_documents() -> None:
    assert WORK == Workload(tokens=4, visible_pairs=7, selected_pairs=6)
    assert Workload.of([3, 1], topk=None) == Workload(4, 7, 7)
    assert Workload.of([0, 2], topk=5) == Workload(2, 3, 3)
    assert Workload.of([3], 2) + Workload.of([1], 2) == WORK


@pytest.mark.parametrize(
    ("options", "indexer"),
    [
        ({}, 4 * INDEXER_PROJECTIONS + 7 * 12),
        (
            {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": True},
            2 * 4 * INDEXER_PROJECTIONS + 7 * 12 + 6 * (2 * 12 + 2 * 9),
        ),
        ({"dsa_indexer_loss_coeff": 1.0}, 2 * 4 * INDEXER_PROJECTIONS + 7 * 12 + 7 * (2 * 12 + 2 * 9)),
    ],
    ids=["frozen", "sparse-loss", "dense-loss"],
)
def test_a_layer_by_hand(options: dict[str, object], indexer: int) -> None:
    assert training_flops(dataclasses.replace(CONFIG, **options), WORK) == 2 * (BACKBONE + indexer)


def test_layers_that_reuse_a_selection_have_no_indexer() -> None:
    two = dataclasses.replace(CONFIG, num_layers=2)
    shared = dataclasses.replace(two, dsa_indexer_topk_freq=[1, 0])
    assert training_flops(two, WORK) - training_flops(shared, WORK) == 2 * (4 * INDEXER_PROJECTIONS + 7 * 12)


def test_experts_count_as_often_as_a_token_visits_them() -> None:
    moe = dict(num_moe_experts=5, moe_router_topk=2, moe_ffn_hidden_size=4, moe_shared_expert_intermediate_size=3)
    difference = training_flops(dataclasses.replace(CONFIG, **moe), WORK) - training_flops(CONFIG, WORK)
    assert difference == 2 * 3 * 4 * (6 * 5 + 3 * 6 * (2 * 4 + 3) - 3 * 6 * 11)


def test_dense_attention_has_no_indexer() -> None:
    dense = dataclasses.replace(CONFIG, experimental_attention_variant=None)
    assert training_flops(dense, WORK) == 2 * BACKBONE
