"""The benchmark's cases and their inputs: random operands, causal documents, selections by the backend itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, DSAttentionSubmodules
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.experimental_attention_variant.dsa.index_share import TopKCache
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, positions
from megatron.core.transformer.experimental_attention_variant.dsa.loss import LossTracker, recompute_contexts
from megatron.core.transformer.spec_utils import ModuleSpec

LATENT, ROPE, INDEX_DIM = 512, 64, 128


@dataclass(frozen=True)
class Workload:
    """One row of the results table.

    ``reuses`` times a layer that attends to another layer's selection, ``recompute`` one under full recompute.
    """

    heads: int
    index_heads: int
    documents: tuple[int, ...]
    loss: str = "off"
    k: int = 2048
    cp_size: int = 1
    reuses: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        lengths = set(self.documents)
        shape = (
            f"{len(self.documents)}x{self.documents[0]}" if len(lengths) == 1 else "+".join(map(str, self.documents))
        )
        shape = shape.removeprefix("1x")
        cp = f" CP{self.cp_size}" if self.cp_size > 1 else ""
        kind = self.loss + " reused" * self.reuses + " recompute" * self.recompute
        return f"H{self.heads} I{self.index_heads} K{self.k} S{shape}{cp} {kind}"

    def layout(self) -> Layout:
        """Causal documents; with context parallelism, the shard of rank 0 (one early chunk and the last one)."""
        return Layout.zigzag(tuple(accumulate(self.documents, initial=0)), self.cp_size, 0)

    def config(self) -> Any:
        """Megatron's flat fields, as ``DSAttention`` reads them."""
        losses = {"off": (None, False), "sparse": (0.001, True), "dense": (0.001, False)}
        coefficient, sparse = losses[self.loss]
        return SimpleNamespace(
            num_layers=2, hidden_size=1024, num_attention_heads=self.heads, q_lora_rank=1024, kv_lora_rank=LATENT,
            qk_head_dim=192, qk_pos_emb_head_dim=ROPE, layernorm_epsilon=1e-6, multi_latent_attention=True,
            dsa_indexer_n_heads=self.index_heads, dsa_indexer_head_dim=INDEX_DIM, dsa_indexer_topk=self.k,
            dsa_indexer_loss_coeff=coefficient, dsa_indexer_use_sparse_loss=sparse, dsa_kernel_backend="cudnn",
            dsa_indexer_topk_freq=2 if self.reuses else 1, dsa_indexer_skip_topk_offset=1,
        )  # fmt: skip


class Operands(nn.Module):
    """In the indexer's place: hands over ready operands, so that no projection is timed."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__()
        self.operands: IndexerInputs | None = None

    def forward(self, x: Tensor, qr: Tensor, positions_T: Tensor) -> IndexerInputs:
        assert self.operands is not None
        return self.operands


class Bench:
    """A ``DSAttention`` with ready operands, and the leaves that it is differentiated in."""

    def __init__(self, workload: Workload, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.workload, self.layout = workload, workload.layout()
        rows, keys = self.layout.num_rows, self.layout.num_keys

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        self.q = normal(rows, workload.heads, LATENT + ROPE).requires_grad_()
        self.kv = normal(keys, LATENT + ROPE).requires_grad_()
        w = normal(rows, workload.index_heads, dtype=torch.float32) * (workload.index_heads * INDEX_DIM) ** -0.5
        self.indexer = IndexerInputs(normal(rows, workload.index_heads, INDEX_DIM), normal(keys, INDEX_DIM), w)
        for leaf in self.indexer_leaves():
            leaf.requires_grad_(workload.loss != "off" and not workload.reuses)
        self.dout = normal(rows, workload.heads * LATENT)
        self.x = torch.empty(rows, 0, device=device)
        indexer = DSAttentionSubmodules(indexer=ModuleSpec(module=Operands))
        self.module = DSAttention(workload.config(), indexer, 2 if workload.reuses else 1)
        self.positions = positions(self.layout, device)
        self.shared = TopKCache()
        if isinstance(self.module.indexer, Operands):
            self.module.indexer.operands = self.indexer
        else:
            self.shared.put(1, self.module.backend.select(self.indexer, self.layout, workload.k))

    def indexer_leaves(self) -> list[Tensor]:
        return [self.indexer.q_TID, self.indexer.k_SD, self.indexer.w_TI]

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.kv, *self.indexer_leaves()) if x.requires_grad]

    def forward(self) -> Tensor:
        cache = self.shared if self.workload.reuses else TopKCache()
        context = ForwardContext(self.layout, self.positions, cache, LossTracker())
        run = partial(self.module, self.q, self.kv, x=self.x, qr=self.x, context=context)
        if not self.workload.recompute:
            return run()
        output: Tensor = checkpoint(run, use_reentrant=False, context_fn=recompute_contexts)
        return output

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves(), self.dout)
