"""Select in FP8 and compare with DeepGEMM's scorer, which vLLM, SGLang and LMDeploy call on Hopper.

    python -m tests.performance_tests.dsa.against_deepgemm make DIR      # ours: operands, selections, scoring times
    python tests/performance_tests/dsa/against_deepgemm.py score DIR     # theirs: needs sgl-deep-gemm, and torch alone
    python -m tests.performance_tests.dsa.against_deepgemm compare DIR   # Markdown; exit code 1 if a row is off

Three steps, because the two libraries want different versions of one dependency: the middle one runs with DeepGEMM's
folder
on the path and imports nothing of this package. Cases: golden vectors, and random keys up to 65,536, alone, packed
among
other documents and as zigzag shards of two ranks. DeepGEMM's logits are ranked by a stable sort, ties to the lowest id.

At most one row in 1,000 may differ, and the keys in which it does must lie within ``ULPS`` of each other.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ULPS = 2
ROWS_PER_DIFFERENCE = 1000
TOPK = 2048
SORT_ROWS = 512


def cases() -> dict[str, tuple[Any, int, int]]:
    """Layout, indexer heads and seed by name; 4,096 rows against 65,536 keys, and the same rows among others."""
    from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

    whole, packed = Layout.causal(1, 65536), Layout.packed((0, 3000, 30001, 65536))
    tail = (65536 - 4096, 65536)
    zigzag = [Layout.zigzag((0, 65536), 2, rank) for rank in (0, 1)]
    found: dict[str, tuple[Any, int, int]] = {}
    for heads in (32, 64):
        found[f"last 4096 rows of 65536, H{heads}"] = (whole.slice_rows(*tail), heads, heads)
        found[f"the same rows, packed among others, H{heads}"] = (packed.slice_rows(*tail), heads, heads)
        found[f"zigzag rank 0 of 2, 4096 rows, H{heads}"] = (zigzag[0].slice_rows(28672, 32768), heads, heads)
        found[f"zigzag rank 1 of 2, 4096 rows, H{heads}"] = (zigzag[1].slice_rows(14000, 18096), heads, heads)
    return found


def correlated(layout: Any, heads: int, seed: int) -> Any:
    """BF16 queries and keys with a common direction, so that scores spread like trained ones."""
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs

    generator = torch.Generator(device="cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    topics = normal(64, 128)
    k = normal(layout.num_keys, 128) + topics[torch.randint(64, (layout.num_keys,), generator=generator, device="cuda")]
    q = (
        normal(layout.num_rows, heads, 128)
        + topics[torch.randint(64, (layout.num_rows, heads), generator=generator, device="cuda")]
    )
    w = normal(layout.num_rows, heads) * (heads * 128) ** -0.5
    return IndexerInputs(q.bfloat16(), k.bfloat16(), w)


def make(folder: Path) -> None:
    """Quantize, select and save every case; print scoring times."""
    from safetensors.torch import load

    from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, scoring
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
    from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds
    from tests.unit_tests.core.transformer.experimental_attention_variant.dsa.backends.cases import make_config

    from .timing import milliseconds

    folder.mkdir(parents=True, exist_ok=True)
    inputs = {name: (layout, correlated(layout, heads, seed), TOPK) for name, (layout, heads, seed) in cases().items()}
    for path in sorted(Path("tests/fixtures/fp8").glob("*.safetensors.gz")):
        golden = load(gzip.decompress(path.read_bytes()))
        if path.name[:2] in ("12", "13") or golden["q"].shape[1] not in (32, 64):
            continue
        rows, keys = golden["q"].shape[0], golden["k"].shape[0]
        layout = layout_of_bounds(golden["ks"].tolist(), golden["ke"].tolist(), rows, keys)
        if layout is None:
            print(f"{path.name}: its rows' bounds are no segments of documents, left out")
            continue
        gate = golden["gate"].float() * (golden["q"].shape[1] * 128) ** -0.5
        operands = IndexerInputs(*(x.cuda() for x in (golden["q"], golden["k"], gate)))
        inputs[f"golden {path.name[:2]}"] = (layout, operands, golden["topk_ids"].shape[1])
    for number, (name, (layout, indexer, k)) in enumerate(inputs.items()):
        config = make_config(n_heads=indexer.q_TID.shape[1], topk=k, scoring_precision="fp8")
        topk = CudnnBackend(config).select(indexer, layout, k)
        operands = scoring.scoring_operands(indexer, config)
        starts, ends = row_bounds(layout, "cuda")
        saved = {
            "name": name,
            "k": k,
            "ids": topk.indices_TK,
            "q": operands.q_TID.values.view(torch.uint8),
            "keys": operands.k_SD.values.view(torch.uint8),
            "k_scale": operands.k_SD.scale,
            "w": operands.w_TI,
            "starts": starts,
            "ends": ends,
        }
        torch.save(saved, folder / f"case{number}.pt")
    layout = Layout.causal(1, 32768)
    indexer = correlated(layout, 64, 0)
    for precision in ("bf16", "fp8"):
        config = make_config(n_heads=64, scoring_precision=precision)
        operands = scoring.scoring_operands(indexer, config)
        calls = scoring.plan(layout, torch.device("cuda", 0), scoring.BYTE_BUDGET).calls
        scored = milliseconds(lambda o=operands, c=calls: [scoring.score(o, call) for call in c] and None)
        whole = milliseconds(lambda c=config: CudnnBackend(c).select(indexer, layout, TOPK))
        print(f"S32768 H64 {precision}: scoring {scored:.2f} ms, quantization + scoring + top-k {whole:.2f} ms")


def layout_of_bounds(starts: list[int], ends: list[int], rows: int, keys: int) -> Any:
    """The layout whose rows see ``[starts, ends)``, or None if there is none."""
    from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, Segment, row_bounds

    segments: list[Segment] = []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end <= start:
            continue
        last = segments[-1] if segments else None
        if last and last.row_stop == row and last.key_start == start and last.key_stop + 1 == end:
            segments[-1] = Segment(last.row_start, row + 1, start, last.causal_offset)
        else:
            segments.append(Segment(row, row + 1, start, end - start - 1))
    layout = Layout(rows, keys, tuple(segments))
    same = [bound.tolist() for bound in row_bounds(layout, "cpu")]
    valid = [i for i in range(rows) if ends[i] > starts[i]]
    return layout if all((same[0][i], same[1][i]) == (starts[i], ends[i]) for i in valid) else None


def score(folder: Path) -> None:
    """DeepGEMM's logits of every case, and the keys that rank highest by them."""
    import deep_gemm

    for path in sorted(folder.glob("case*.pt")):
        case = torch.load(path, map_location="cuda")
        q, keys = (case[name].view(torch.float8_e4m3fn) for name in ("q", "keys"))
        count = keys.shape[0]
        storage = torch.zeros(-(-count // 4) * 4, device="cuda")
        storage[:count] = case["k_scale"]
        ids, logits = [], []
        for start in range(0, q.shape[0], SORT_ROWS):
            rows = slice(start, start + SORT_ROWS)
            starts, ends = case["starts"][rows].contiguous(), case["ends"][rows].contiguous()
            part = deep_gemm.fp8_mqa_logits(
                q[rows].contiguous(),
                (keys, storage[:count]),
                case["w"][rows].contiguous(),
                starts,
                ends,
                clean_logits=False,
            )[:, :count]
            best = best_keys(part, starts, ends, case["k"])
            both = torch.cat((best, case["ids"][rows]), dim=1)
            ids.append(best)
            logits.append(part.gather(1, both.clamp(min=0).long()).masked_fill(both < 0, torch.nan))
        torch.save({"ids": torch.cat(ids), "logits": torch.cat(logits)}, path.with_name(f"theirs_{path.name}"))


def best_keys(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> Tensor:
    """Ids ``[rows, k]`` of the largest logits inside the bounds, ties to the lowest id; ascending, then -1."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    visible = (columns >= starts[:, None]) & (columns < ends[:, None])
    ranked = torch.where(visible, logits + 0.0, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    past = torch.arange(ranked.shape[1], device=logits.device) >= (ends - starts).clamp(max=k)[:, None]
    ids = ranked.masked_fill(past, logits.shape[1]).sort(dim=-1).values
    ids = torch.nn.functional.pad(ids, (0, k - ids.shape[1]), value=logits.shape[1])
    return torch.where(ids == logits.shape[1], -1, ids).int()


def compare(folder: Path) -> int:
    """Print a table; 1 if more rows differ than may, or by more than their last bits."""
    failed = False
    print("| case | rows | rows with another set | largest gap between the keys that differ |\n|---|--:|--:|--:|")
    for path in sorted(folder.glob("case*.pt"), key=lambda p: int(p.stem[4:])):
        ours, theirs = torch.load(path, map_location="cuda"), torch.load(path.with_name(f"theirs_{path.name}"))
        theirs = {name: value.cuda() for name, value in theirs.items()}
        rows, k = ours["ids"].shape
        differing = (ours["ids"] != theirs["ids"]).any(1).nonzero().flatten().tolist()
        gap = 0.0
        for row in differing:
            best, mine = (set(x[row].tolist()) - {-1} for x in (theirs["ids"], ours["ids"]))
            keys = theirs["ids"][row].tolist() + ours["ids"][row].tolist()
            value = dict(zip(keys, theirs["logits"][row].tolist(), strict=True))
            spread = [value[key] for key in best ^ mine]
            ulp = torch.finfo(torch.float32).eps * max(map(abs, spread))
            gap = max(gap, (max(spread) - min(spread)) / ulp if ulp else 0.0)
        failed |= len(differing) * ROWS_PER_DIFFERENCE > max(rows, ROWS_PER_DIFFERENCE) or gap > ULPS
        print(f"| {ours['name']} | {rows} | {len(differing)} | {gap:.1f} ulp |")
    return int(failed)


if __name__ == "__main__":
    step, directory = sys.argv[1], Path(sys.argv[2])
    sys.exit({"make": make, "score": score, "compare": compare}[step](directory))
