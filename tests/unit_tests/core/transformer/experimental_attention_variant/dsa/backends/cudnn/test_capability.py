"""What the cudnn backend refuses, in which words, and that asking needs no GPU package."""

import subprocess
import sys
from functools import wraps
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends import resolve
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import capability
from megatron.core.transformer.experimental_attention_variant.dsa.config import DSAConfig

from .. import emulator
from ..cases import make_config

FRONTEND_COMMAND = "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32,<2'"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything; FlashMLA's trial row runs on the CPU, in the emulator."""
    emulator.install(monkeypatch)
    trial = capability._trial_fault
    monkeypatch.setattr(capability, "_trial_fault", lambda function, width, device: trial(function, width, CPU))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(capability, "version", lambda package: "1.32.0")
    monkeypatch.setattr(capability, "find_spec", lambda name: object())


def reason(config: DSAConfig | None = None, device: torch.device = CUDA) -> str | None:
    return resolve("cudnn").unsupported(config or make_config(), device)


def test_a_hopper_with_the_packages_is_supported(hopper: None) -> None:
    assert reason() is None


@pytest.mark.parametrize("width", [0, 64])
def test_both_rotary_widths_are_supported(hopper: None, width: int) -> None:
    assert reason(make_config(qk_pos_emb_head_dim=width)) is None


SHAPES = [
    ({"head_dim": 64}, "dsa_indexer_head_dim=64", "128"),
    ({"n_heads": 65}, "dsa_indexer_n_heads=65", "at most 64"),
    ({"topk": 2049}, "dsa_indexer_topk=2049", "at most 2048"),
    ({"kv_lora_rank": 256}, "kv_lora_rank=256", "512"),
    ({"qk_pos_emb_head_dim": 32}, "qk_pos_emb_head_dim=32", "0 or 64"),
    ({"scoring_relu": False}, "dsa_indexer_scoring_relu=False", "True"),
]


@pytest.mark.parametrize(("changes", "option", "limit"), SHAPES, ids=lambda value: str(value))
def test_a_shape_that_no_kernel_takes(hopper: None, changes: dict, option: str, limit: str) -> None:
    text = reason(make_config(**changes))
    assert text is not None and option in text and limit in text and "dsa_kernel_backend='none'" in text


@pytest.mark.parametrize(
    ("coeff", "kernels"), [(None, "sparse_attention_backward (dkv)"), (0.5, "indexer_backward (dk)")]
)
def test_kernels_that_sum_in_any_order(coeff: float | None, kernels: str) -> None:
    """Said before anything of the machine: no machine would do."""
    text = reason(make_config(deterministic_mode=True, loss_coeff=coeff), CPU)
    assert text is not None and text.startswith("deterministic_mode=True cannot train") and kernels in text
    assert ("dsa_indexer_loss_coeff=0.5" in text) == (coeff is not None)
    assert text.endswith("set dsa_kernel_backend='none', or deterministic_mode=False.")


@pytest.mark.parametrize("heads", [1, 8, 16, 24, 32, 48, 64])
def test_every_smaller_number_of_indexer_heads_is_padded_not_refused(hopper: None, heads: int) -> None:
    assert reason(make_config(n_heads=heads)) is None


def test_a_cpu_is_refused(hopper: None) -> None:
    text = reason(device=torch.device("cpu"))
    assert text is not None and "cpu" in text and "SM 9.0" in text


@pytest.mark.parametrize(("major", "minor", "word"), [(8, 0, "SM 8.0"), (10, 0, "Blackwell"), (12, 0, "Blackwell")])
def test_other_architectures_are_refused_by_name(
    hopper: None, monkeypatch: pytest.MonkeyPatch, major: int, minor: int, word: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    text = reason()
    assert text is not None and word in text and f"SM {major}.{minor}" in text


@pytest.mark.parametrize("installed", ["1.31.0", "0.9", "1.9.9", "2.0", "2.0.0rc1", "10.1"])
def test_another_frontend_is_refused_with_the_command(
    hopper: None, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(capability, "version", lambda package: installed)
    text = reason()
    assert text is not None and installed in text and FRONTEND_COMMAND in text


@pytest.mark.parametrize("installed", ["1.32", "1.32.0rc1", "1.40.2", "1.99"])
def test_a_newer_frontend_is_taken(hopper: None, monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(capability, "version", lambda package: installed)
    assert reason() is None


def test_a_missing_frontend_is_refused_with_the_command(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(capability, "version", missing)
    text = reason()
    assert text is not None and FRONTEND_COMMAND in text


@pytest.mark.parametrize("width", [0, 64])
def test_an_upstream_flash_mla_with_sm90_kernels_is_taken(
    hopper: None, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    emulator.install(monkeypatch, "upstream")
    assert reason(make_config(qk_pos_emb_head_dim=width)) is None


UNFIT = [
    ("SM 10.0 only", "only supported on SM100f"),
    ("without lengths", "without topk_length"),
    ("base 2", "log-sum-exp 1.443"),
]


@pytest.mark.parametrize(("build", "found"), UNFIT)
def test_another_flash_mla_is_refused_with_the_command(
    hopper: None, monkeypatch: pytest.MonkeyPatch, build: str, found: str
) -> None:
    emulator.install(monkeypatch, build)
    text = reason()
    assert text is not None and found in text and "pip install 'sgl-flash-mla>=1.0'" in text
    assert "\n" not in text and text.count(". ") == 0, "one sentence"


@pytest.mark.parametrize("which", [0, 2], ids=["output", "log-sum-exp"])
def test_a_flash_mla_of_nan_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    emulator.install(monkeypatch)
    forward = sys.modules["flash_mla"].flash_mla_sparse_fwd

    @wraps(forward)
    def broken(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        results = list(forward(*args, **options))
        results[which] = torch.full_like(results[which], torch.nan)
        return tuple(results)

    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_sparse_fwd", broken)
    text = reason()
    assert text is not None and " nan " in text and "where both are 1" in text


def test_a_flash_mla_that_does_not_load_is_refused_with_the_command(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    text = reason()
    assert text is not None and "cannot import name" in text and "pip install 'sgl-flash-mla>=1.0'" in text


def test_memory_that_is_short_for_a_moment_is_no_fault_of_flash_mla(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    forward = sys.modules["flash_mla"].flash_mla_sparse_fwd
    full = [True]

    @wraps(forward)
    def short(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        result: tuple[torch.Tensor, ...] = forward(*args, **options)
        return result

    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_sparse_fwd", short)
    with pytest.raises(torch.OutOfMemoryError):
        reason()
    assert reason() is None


def test_flash_mla_is_tried_once_in_a_process(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = emulator.install(monkeypatch)
    for _ in range(3):
        assert reason() is None
    assert stand_in.calls["flash_mla"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [0, 64])
def test_this_machine_is_supported(width: int) -> None:
    assert reason(make_config(qk_pos_emb_head_dim=width), torch.device("cuda", torch.cuda.current_device())) is None


@pytest.mark.parametrize(
    ("missing", "command"), [("flash_mla", "pip install 'sgl-flash-mla>=1.0'"), ("triton", "pip install triton")]
)
def test_a_missing_package_is_refused_with_the_command(
    hopper: None, monkeypatch: pytest.MonkeyPatch, missing: str, command: str
) -> None:
    monkeypatch.setattr(capability, "find_spec", lambda name: None if name == missing else object())
    text = reason(make_config(loss_coeff=0.1))
    assert text is not None and command in text


def test_without_the_loss_triton_is_not_needed(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "find_spec", lambda name: None if name == "triton" else object())
    assert reason() is None


def test_asking_imports_no_gpu_package() -> None:
    program = (
        "import sys, torch\n"
        "from megatron.core.transformer.experimental_attention_variant.dsa.backends import resolve\n"
        "from tests.unit_tests.core.transformer.experimental_attention_variant.dsa.backends.cases import make_config\n"
        "assert resolve('cudnn').unsupported(make_config(), torch.device('cpu'))\n"
        "bad = {'cudnn', 'cutlass', 'flash_mla', 'triton'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
