"""Each kernel of the cudnn backend, run again on the same operands while another stream keeps the memory busy.

On a GPU the real kernels must repeat every bit; the few that add up atomically are measured instead, and the summary
of the run shows the largest relative difference for the manifest's ``spread``. On a CPU the emulator stands in for
the kernels, which proves only that the tests run. Sizes on the GPU are such that thousands of blocks meet in the same
keys.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.dense_latent_attention import DenseLatentAttention
from megatron.core.transformer.experimental_attention_variant.dsa.backends import resolve
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import frontend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import Attended, Backend, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, Segment
from megatron.core.transformer.experimental_attention_variant.dsa.quantization import quantize_e4m3
from megatron.core.transformer.moe.experts import grouped_linear
from megatron.training.prepare import make_deterministic
from tests.conftest import MEASURED
from tests.unit_tests.core.transformer.experimental_attention_variant.dsa import test_rope_precision as indexer_stub
from tests.unit_tests.core.transformer.experimental_attention_variant.dsa.backends import cases
from tests.unit_tests.core.transformer.experimental_attention_variant.dsa.backends.cases import Case, Inputs
from tests.unit_tests.core.transformer.experimental_attention_variant.dsa.backends.conftest import Stage, stage

from .manifest import MANIFEST

__all__ = ["stage"]

RERUNS = 4
COPIES, MOST_COPIES, COPY_BYTES = 24, 24 * 2**6, 2**29
# A sum in another order differs by its rounding; anything larger is a race.
LARGEST_SPREAD = 1e-2
Tensors = tuple[Tensor, ...]
RecordProperty = Callable[[str, object], None]


class Copies:
    """Copies of memory on another stream: as many as are asked for, and whether they are still going on."""

    def __init__(self, device: torch.device) -> None:
        self.source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        self.target, self.stream = torch.empty_like(self.source), torch.cuda.Stream(device)

    def start(self, copies: int) -> None:
        torch.cuda.synchronize(self.source.device)
        with torch.cuda.stream(self.stream):
            for _ in range(copies):
                self.target.copy_(self.source)

    def outlast(self) -> bool:
        """Whether copies are left to do when all of the work on the current stream is done."""
        torch.cuda.current_stream(self.source.device).synchronize()
        return not self.stream.query()


def disturbed(function: Callable[[], Tensors], copies: Copies) -> Tensors:
    """The results of a run beside which the copies never ceased; more of them until that is so."""
    count = COPIES
    while count <= MOST_COPIES:
        copies.start(count)
        results = tuple(x.detach().clone() for x in function())
        if copies.outlast():
            return results
        count *= 2
    raise AssertionError(f"{count // 2} copies ended before the work that they were to disturb")


def reruns(function: Callable[[], Tensors], device: torch.device) -> list[Tensors]:
    """The results of the first, undisturbed run and of the disturbed ones (on the emulator, one more)."""
    results = [tuple(x.detach().clone() for x in function())]
    if device.type != "cuda":
        return [*results, tuple(x.detach().clone() for x in function())]
    copies = Copies(device)
    results += [disturbed(function, copies) for _ in range(RERUNS)]
    torch.cuda.synchronize(device)
    return results


def assert_repeats(function: Callable[[], Tensors], device: torch.device) -> None:
    first, *others = reruns(function, device)
    assert all(x.numel() for x in first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def spread(results: list[Tensors], i: int) -> float:
    """The largest norm of a difference between two runs of output ``i``, over its norm."""
    first = results[0][i].double()
    return max(float((other[i].double() - first).norm() / first.norm()) for other in results[1:])


def check_spread(where: str, value: float, record_property: RecordProperty) -> None:
    """Hold a spread to the one that the manifest lists, and have the summary show it (the emulator has none)."""
    if value:
        record_property(MEASURED, f"spread of {where}: {value:.2e}")
    listed = MANIFEST[f"dsa/backends/cudnn/frontend.py:{where}"].spread
    assert value <= (LARGEST_SPREAD if listed is None else 4 * listed)


@pytest.fixture
def lengths(stage: Stage) -> tuple[int, ...]:
    return (5, 90) if stage.emulator else (3, 2100, 300, 4096)


def prepare(
    stage: Stage, lengths: tuple[int, ...], layout: str, loss: str, index_heads: int = 32, **options: object
) -> tuple[Backend, Inputs, Layout, Case]:
    case = Case(layout, loss, 64, index_heads, 64 if stage.emulator else 512, torch.bfloat16, lengths)
    backend = resolve("cudnn")(case.config(**options))
    shape = case.layouts()[0]
    return backend, cases.make_inputs(shape, case, stage.device), shape, case


def selected(topk: TopK) -> Tensors:
    if topk.scores_TK is None:
        return topk.indices_TK, topk.length_T
    return topk.indices_TK, topk.length_T, topk.scores_TK.masked_fill(topk.indices_TK < 0, 0.0)


@pytest.mark.parametrize("index_heads", [32, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["packed", "zigzag2"])
def test_selection_and_its_scores(
    stage: Stage, lengths: tuple[int, ...], layout: str, precision: str, index_heads: int
) -> None:
    loss = "off" if precision == "fp8" else "sparse"
    backend, inputs, shape, case = prepare(stage, lengths, layout, loss, index_heads, scoring_precision=precision)
    assert_repeats(lambda: selected(backend.select(inputs.indexer, shape, case.k)), stage.device)


def test_top_k_among_ties(stage: Stage) -> None:
    """Rows in which a few keys score above a plateau of zeros, as ReLU makes them."""
    rows, columns, k = (5, 300, 64) if stage.emulator else (2048, 16384, 2048)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(rows, columns, generator=generator).mul(2).sub(1.99).relu().to(stage.device)
    length = torch.full((rows,), columns, dtype=torch.int32, device=stage.device)
    assert_repeats(lambda: (frontend.top_k(scores, length, k, False)[0],), stage.device)


def test_scores_of_a_replayed_selection(stage: Stage, lengths: tuple[int, ...]) -> None:
    backend, inputs, shape, case = prepare(stage, lengths, "zigzag2", "sparse")
    topk = backend.select(inputs.indexer, shape, case.k)._replace(scores_TK=None)
    attended = backend.attend(inputs.attention, topk, shape)
    assert_repeats(lambda: (cases.kl_sum(backend, inputs, attended, topk, shape, False)[None],), stage.device)


@pytest.mark.parametrize("heads", [64, 128])
def test_attention_forward(stage: Stage, lengths: tuple[int, ...], heads: int) -> None:
    case = Case("packed", "off", heads, 32, 64 if stage.emulator else 512, torch.bfloat16, lengths)
    backend, shape = resolve("cudnn")(case.config()), case.layouts()[0]
    inputs = cases.make_inputs(shape, case, stage.device)
    topk = backend.select(inputs.indexer, shape, case.k)
    assert_repeats(lambda: tuple(backend.attend(inputs.attention, topk, shape)), stage.device)


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_teacher_and_loss(stage: Stage, lengths: tuple[int, ...], loss: str) -> None:
    """The targets of every chunk, and the KL sum made of them (with the log-sum-exp kernel where it is dense)."""
    backend, inputs, shape, case = prepare(stage, lengths, "packed", loss)
    topk = backend.select(inputs.indexer, shape, case.k)
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, topk, shape)))
    dense = loss == "dense"

    def run() -> Tensors:
        targets = [c.target_RN for c in backend.teacher(inputs.attention, attended, topk, shape, dense)]
        with torch.no_grad():
            return (*targets, cases.kl_sum(backend, inputs, attended, topk, shape, dense)[None])

    assert_repeats(run, stage.device)


@pytest.mark.parametrize("rope_fp32", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_indexer_preprocessing(stage: Stage, rope_fp32: bool, rotate: bool) -> None:
    """From the projections to the scoring boundary."""
    file = {name: x.to(stage.device) for name, x in indexer_stub.golden(indexer_stub.POLICIES).items()}
    repeats = 1 if stage.emulator else 512
    indexer = indexer_stub.build(rope_fp32=rope_fp32, rotate_activation=rotate).to(stage.device)
    k, q = file["k_raw"].repeat(repeats, 1), file["q_raw"].flatten(1).repeat(repeats, 1)
    positions = torch.arange(len(k), device=stage.device)

    @torch.no_grad()
    def run() -> Tensors:
        made = indexer(k, q, positions)
        return made.q_TID, made.k_SD, made.w_TI

    assert_repeats(run, stage.device)


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_quantization(stage: Stage, scale_format: str) -> None:
    x = torch.randn(37 if stage.emulator else 8192, 32, 128, generator=torch.Generator().manual_seed(0))
    x, quantize = x.to(stage.device), quantize_e4m3
    if not stage.emulator:
        from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import quantize as kernel

        quantize = kernel.quantize_e4m3
    assert_repeats(lambda: tuple(quantize(x, scale_format)), stage.device)


# ---- of PyTorch ----


@pytest.fixture
def deterministic(stage: Stage) -> Iterator[None]:
    """As in deterministic mode, which is what these are replayed for."""
    before = torch.are_deterministic_algorithms_enabled()
    make_deterministic(stage.device, 1)
    yield
    torch.use_deterministic_algorithms(before)


def with_gradients(function: Callable[..., Tensor], *operands: Tensor) -> Tensors:
    leaves = [x.detach().requires_grad_() for x in operands]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out.float().sin().sum(), leaves))


def test_grouped_products(stage: Stage, deterministic: None) -> None:
    """Experts with no rows, few and many."""
    sizes = (0, 3, 20, 1) if stage.emulator else (0, 3, 2100, 1, 4096, 300, 0, 17)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).to(stage.device, torch.bfloat16)
        for shape in ((sum(sizes), 256), (len(sizes), 384, 256))
    )
    ends = torch.tensor(sizes, device=stage.device).cumsum(0).int()
    assert_repeats(lambda: with_gradients(lambda a, b: grouped_linear(a, b, ends), x, weight), stage.device)


@pytest.mark.parametrize("offset", [0, 70])
def test_dense_attention(stage: Stage, offset: int, deterministic: None) -> None:
    """A whole document, and rows that see more keys than they are."""
    rows, heads = (40, 2) if stage.emulator else (1500, 16)
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(*shape, generator=generator).to(stage.device, torch.bfloat16)
        for shape in ((rows, heads, cases.WIDTH), (rows + offset, cases.WIDTH))
    )
    layer = SimpleNamespace(config=SimpleNamespace(kv_lora_rank=cases.LATENT), softmax_scale=cases.WIDTH**-0.5)
    segment = Segment(0, rows, 0, offset)
    assert_repeats(
        lambda: with_gradients(lambda a, b: DenseLatentAttention._attend(layer, a, b, segment), q, k), stage.device
    )


# ---- not exact: measured ----


def test_attention_backward_spread(stage: Stage, lengths: tuple[int, ...], record_property: RecordProperty) -> None:
    """dq repeats its bits; dkv is added up atomically on SM 9.0."""
    backend, inputs, shape, case = prepare(stage, lengths, "packed", "off")
    topk = backend.select(inputs.indexer, shape, case.k)
    leaves = inputs.attention.q_THD, inputs.attention.kv_SD

    def run() -> Tensors:
        out = backend.attend(inputs.attention, topk, shape).out_THV
        return torch.autograd.grad((out * inputs.dout).sum(), leaves)

    results = reruns(run, stage.device)
    assert spread(results, 0) == 0
    check_spread("sparse_backward", spread(results, 1), record_property)


@pytest.mark.parametrize(("loss", "where"), [("sparse", "indexer_backward"), ("dense", "dense_indexer_backward")])
def test_indexer_backward_spread(
    stage: Stage, lengths: tuple[int, ...], loss: str, where: str, record_property: RecordProperty
) -> None:
    """dq repeats its bits; dk and dw are added up atomically on SM 9.0.

    For dw an H200 measured 4.1e-6 (sparse) and 1.1e-5 (dense).
    """
    backend, inputs, shape, case = prepare(stage, lengths, "packed", loss)
    topk = backend.select(inputs.indexer, shape, case.k)
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, topk, shape)))
    leaves = inputs.indexer.q_TID, inputs.indexer.w_TI, inputs.indexer.k_SD

    def run() -> Tensors:
        return torch.autograd.grad(cases.kl_sum(backend, inputs, attended, topk, shape, loss == "dense"), leaves)

    results = reruns(run, stage.device)
    assert spread(results, 0) == 0
    check_spread(where, max(spread(results, 1), spread(results, 2)), record_property)


# ---- the check itself ----


def test_a_result_that_changes_is_noticed() -> None:
    runs = iter(torch.tensor([[1.0], [1.0 + 2**-23]]))
    with pytest.raises(AssertionError):
        assert_repeats(lambda: (next(runs),), torch.device("cpu"))


class CopiesThatEnd(Copies):
    """Copies that outlast the work only where there are enough of them."""

    def __init__(self, enough: int) -> None:
        self.enough, self.started = enough, []

    def start(self, copies: int) -> None:
        self.started.append(copies)

    def outlast(self) -> bool:
        return self.started[-1] >= self.enough


def test_a_disturbance_that_ends_early_is_raised_or_refused() -> None:
    copies = CopiesThatEnd(3 * COPIES)
    assert disturbed(lambda: (torch.tensor(len(copies.started)),), copies)[0] == 3
    assert copies.started == [COPIES, 2 * COPIES, 4 * COPIES]
    with pytest.raises(AssertionError, match=f"{MOST_COPIES} copies ended before the work"):
        disturbed(lambda: (torch.zeros(1),), CopiesThatEnd(MOST_COPIES + 1))
