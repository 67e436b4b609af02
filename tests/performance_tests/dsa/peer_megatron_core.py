"""Time released megatron-core's fused DSA attention on benchmark cases, in a process of its own.

Reads cases from stdin, one a line: "HEADS INDEX_HEADS TOKENS off|sparse|dense TOPK". Answers each with a line, "forward
/ forward+backward ms, peak GiB" (one repetition after one warm-up) or the error. It stays for all cases, so that its
kernels compile once, and gives its memory back between them. FlashMLA's SM90 kernels stand behind an argument that
megatron-core 0.19 does not pass, so the function is wrapped before it is imported.
"""

from __future__ import annotations

import sys
import time

import flash_mla
import torch

_forward = flash_mla.flash_mla_sparse_fwd


def _legacy_forward(*args: object, indexer_topk: int = 0, **kwargs: object) -> object:
    """The SM90 kernel; megatron-core also passes an argument of another build, always 0."""
    assert indexer_topk == 0
    return _forward(*args, use_legacy=True, **kwargs)


flash_mla.flash_mla_sparse_fwd = _legacy_forward

from megatron.core.transformer.experimental_attention_variant import dsa_cudnn_kernels as peer  # noqa: E402

LATENT, ROPE, INDEX_DIM = 512, 64, 128


def measure(heads: int, index_heads: int, tokens: int, loss: str, k: int) -> str:
    """One case's figures."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    query, key = normal(tokens, 1, heads, LATENT + ROPE), normal(tokens, 1, LATENT + ROPE)
    q, keys = normal(tokens, 1, index_heads, INDEX_DIM), normal(tokens, 1, INDEX_DIM)
    w = normal(tokens, 1, index_heads) * (index_heads * INDEX_DIM) ** -0.5
    leaves = [query, key] if loss == "off" else [query, key, q, keys, w]
    for leaf in leaves:
        leaf.requires_grad_()

    def forward() -> tuple[torch.Tensor, ...]:
        return peer.fused_indexer_sparse_attn(
            query, key, q, keys, w, k, (LATENT + ROPE) ** -0.5,
            loss_coeff=0.0 if loss == "off" else 0.001, sparse_loss=loss == "sparse", d_v=LATENT,
        )  # fmt: skip

    def forward_backward() -> None:
        out, indexer_loss = forward()
        total = out.float().sum() + (0.0 if loss == "off" else indexer_loss.sum())
        torch.autograd.grad(total, leaves, allow_unused=True)

    def milliseconds(function: object) -> float:
        function()  # type: ignore[operator]
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()  # type: ignore[operator]
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, both = milliseconds(forward), milliseconds(forward_backward)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return f"{first:.1f} / {both:.1f}, {peak:.1f}"


def main() -> None:
    for line in sys.stdin:
        heads, index_heads, tokens, loss, k = line.split()
        try:
            answer = measure(int(heads), int(index_heads), int(tokens), loss, int(k))
        except Exception as error:  # the next case may work
            answer = f"failed: {type(error).__name__} {error}".splitlines()[0]
        torch.cuda.empty_cache()
        print(answer, flush=True)


if __name__ == "__main__":
    main()
