"""Plain lines into a pipe, a progress bar on a terminal."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron.training.console import Console, rate

RECORD = {
    "step": 4, "lm_loss": 2.5, "indexer_loss": 0.125, "tokens_per_second": 12345.0, "lr": 1e-3, "grad_norm": 0.5,
    "mfu": None, "dsa_attention_mass": None,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (950, "950"), (12345, "12.3K"), (4_560_000, "4.56M"), (2e9, "2G"), (5e12, "5e+03G")],
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert rate(value) == text


def test_lines_come_at_the_interval_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(0, 5, log_interval=4)
    for step in range(1, 6):
        console.step(RECORD | {"step": step})
    console.say("A notice.")
    console.close()
    line = "LM loss 2.5000, indexer loss 0.1250, 12.3K tokens/s, lr 0.001, grad norm 0.5"
    assert capsys.readouterr().err.splitlines() == [f"step 4/5: {line}", f"step 5/5: {line}", "A notice."]


def test_an_evaluation_shows_between_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(0, 5, log_interval=4)
    for step in range(1, 5):
        console.step(RECORD | {"step": step} | ({"valid_lm_loss": 2.25} if step % 2 == 0 else {}))
    lines = capsys.readouterr().err.splitlines()
    assert [lines[0], lines[2]] == [f"step {step}/5: validation LM loss 2.2500" for step in (2, 4)]
    assert len(lines) == 3


def test_a_frozen_indexer_and_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    record = RECORD | {"indexer_loss": None, "dsa_attention_mass": 0.75, "mfu": 0.421}
    Console(0, 4, 1).step(record)
    assert "LM loss 2.5000, mass 0.750, 12.3K tokens/s, MFU 42.1%, lr" in capsys.readouterr().err
    Console(0, 4, 1).step(record | {"load_balancing_loss": 1.25})
    assert "LM loss 2.5000, load balancing loss 1.2500, mass 0.750" in capsys.readouterr().err


def test_a_real_terminal_gets_a_bar_whatever_its_width() -> None:
    for rows, columns in ((0, 0), (24, 150)):
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        code = (
            "from megatron.training.console import Console; c = Console(3, 10, 100);"
            "c.step(dict(step=4, lm_loss=2.5, tokens_per_second=9.0)); c.close()"
        )
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        subprocess.run([sys.executable, "-c", code], stderr=child, env=environment, check=True)
        os.close(child)
        shown = os.read(parent, 10000).decode()
        os.close(parent)
        assert "4/10" in shown and "LM loss 2.5000, 9 tokens/s" in shown, (columns, shown)


def test_a_terminal_gets_a_bar_that_starts_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(3, 10, log_interval=100)
    console.step(RECORD)
    console.say("A notice.")
    console.close()
    console.say("The end.")
    text = terminal.getvalue()
    assert "4/10" in text and "LM loss 2.5000, indexer loss 0.1250, 12.3K tokens/s" in text
    assert "A notice.\n" in text and text.endswith("The end.\n")
