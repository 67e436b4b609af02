"""The tool on files whose differences are known, and what it says about files that cannot be compared."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import selection_file
from megatron.core.transformer.experimental_attention_variant.dsa.selection_file import read_topk
from megatron.tools.compare_topk import LayerComparison, Place, compare, main, report

K, LENGTHS, LAYERS = 4, (10, 3, 20), (1, 2, 5)


def selections() -> dict[str, Tensor]:
    """Each token attends to the first ``K`` positions that it sees."""
    rows = {m: torch.arange(K).repeat(n, 1) for m, n in enumerate(LENGTHS)}
    rows = {m: torch.where(ids <= torch.arange(len(ids))[:, None], ids, -1) for m, ids in rows.items()}
    return {f"layer.{layer}.document.{m}": ids.int().clone() for layer in LAYERS for m, ids in rows.items()}


@pytest.fixture
def same(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        save_file(selections(), path)
    return a, b


def changed(path: Path) -> None:
    tensors = selections()
    tensors["layer.2.document.2"][19] = torch.tensor([0, 1, 2, 19])
    tensors["layer.2.document.2"][7] = torch.tensor([4, 5, 6, 7])
    tensors["layer.5.document.0"][9, 0] = 9
    save_file(tensors, path)


def run(*arguments: object) -> list[LayerComparison]:
    a, b = (read_topk(str(path)) for path in arguments)
    return list(compare(a, b))


def test_equal_files(same: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*map(str, same), "--png", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "All layers select the same keys." in out and out.count("100%") == 12
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["picture", "picture.v2"])
def test_the_picture_is_a_png_under_the_name_that_was_given(same: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    assert main([*map(str, same), "--png", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_differences_are_counted(same: tuple[Path, Path]) -> None:
    changed(same[1])
    first, second, third = run(*same)
    # 10 + 3 + 20 rows, of which those after the fourth of a document choose.
    assert (first.rows, first.choosing_rows) == (33, 6 + 16)
    assert (first.equal, first.choosing_equal, first.overlap, first.choosing_overlap) == (33, 22, 33, 22)
    assert (second.equal, second.choosing_equal) == (31, 20)
    assert second.overlap == 31 + 0.75 and second.choosing_overlap == 20 + 0.75
    assert (third.equal, third.overlap) == (32, 32 + 0.75)
    assert (first.first, second.first, third.first) == (None, Place(2, 2, 7), Place(5, 0, 9))
    assert second.bins.sum(-1).tolist() == [22, 20.75] and second.bins[0, 7 * 64 // 20] == 2
    assert second.bins[1, 7 * 64 // 20] == 1


def test_the_report_names_the_first_differing_layer(
    same: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changed(same[1])
    assert main([*map(str, same), "--png", str(tmp_path / "p.png")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "First difference: layer 2, document 2, token 7." in out
    assert out[1].split() == ["1", "33", "100%", "100%", "|", "22", "100%", "100%"]
    assert out[2].split() == ["2", "33", "93.9394%", "96.2121%", "|", "22", "90.9091%", "94.3182%"]
    assert out[-1] == f"Picture: {tmp_path / 'p.png'}"


def test_sets_of_different_sizes_overlap_by_the_larger(same: tuple[Path, Path]) -> None:
    tensors = selections()
    tensors["layer.1.document.0"][9] = torch.tensor([0, -1, -1, -1])
    save_file(tensors, same[1])
    first, *_ = run(*same)
    assert first.equal == 32 and first.overlap == 32.25
    assert run(*reversed(same))[0].overlap == 32.25


def test_a_share_is_never_rounded_up_to_all() -> None:
    almost = LayerComparison(1, 10**9, 10**9 - 1, 10**9 - 0.5, 0, 0, 0.0, torch.zeros(2, 64), Place(1, 0, 0))
    assert "100%" not in report([almost])


def test_files_in_which_no_row_chose_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a"
    save_file({"layer.1.document.0": torch.tensor([[0, -1], [0, 1]], dtype=torch.int32)}, path)
    assert main([str(path), str(path), "--png", str(tmp_path / "p.png")]) == 0
    assert "no row had to choose" in capsys.readouterr().out


def test_what_cannot_be_compared_ends_with_one_sentence(
    same: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b = same
    png = tmp_path / "p.png"
    tensors = selections()
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({k: v for k, v in tensors.items() if "layer.5" not in k}, "layers [1, 2, 5], "),
        ({k: v for k, v in tensors.items() if "document.2" not in k}, "other documents (3 and 2 of them)"),
        ({k: v[:-1] if "document.2" in k else v for k, v in tensors.items()}, "document 2 has 20 and 19 tokens"),
        ({"x": torch.zeros(1)}, "a selection file holds int32 tensors"),
    ]
    for content, message in cases:
        save_file({k: v.contiguous() for k, v in content.items()}, b)
        assert main([str(a), str(b), "--png", str(png)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert main([str(a), str(tmp_path / "gone"), "--png", str(png)]) == 2
    assert "No such file" in capsys.readouterr().err and not png.exists()


@pytest.mark.parametrize(
    ("png", "message"),
    [
        ("gone/p.png", "gone, which is no folder: create it first."),
        ("/proc/p.png", "The folder of --png /proc cannot"),
        ("/proc", "--png /proc is a folder: name the file to write."),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_comparison(
    png: str, message: str, same: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, same), "--png", png]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("arguments", [["a", ""], ["a", "b", "--png="], ["one"], ["a", "b", "--nope"], []])
def test_a_wrong_command_line_ends_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("compare_topk: ")


def test_blocks_do_not_change_the_figures(same: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    changed(same[1])
    whole = run(*same)
    monkeypatch.setattr(selection_file, "_BLOCK_ROWS", 3)
    for a, b in zip(whole, run(*same), strict=True):
        assert (a.rows, a.equal, a.overlap, a.first) == (b.rows, b.equal, b.overlap, b.first)
        assert torch.equal(a.bins, b.bins)
