"""What the user sees while the run goes on: a progress bar on a terminal, plain lines anywhere else.

Everything goes to stderr. Notices of any length pass through here too, so that none of them tears the bar.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

# Columns and rows; tqdm draws nothing on a terminal that says it has 0 of either.
_ASSUMED_SIZE = (120, 24)


def rate(value: float) -> str:
    """A number of a few digits: 950, 12.3K, 4.56M."""
    for unit in ("", "K", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


class Console:
    """Progress of steps ``first_step`` to ``last_step``."""

    def __init__(self, finished_steps: int, last_step: int, log_interval: int) -> None:
        self._last_step = last_step
        self._interval = log_interval
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            known = _terminal_width() > 0
            self._bar = tqdm(
                total=last_step,
                initial=finished_steps,
                desc="train",
                unit="step",
                dynamic_ncols=known,
                ncols=None if known else _ASSUMED_SIZE[0],
                nrows=None if known else _ASSUMED_SIZE[1],
            )

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one finished step, and what its evaluation found whatever the interval."""
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(record), refresh=False)
            self._bar.update()
        elif record["step"] % self._interval == 0 or record["step"] == self._last_step:
            extra = f", lr {record['lr']:.3g}, grad norm {record['grad_norm']:.3g}"
            print(f"step {record['step']}/{self._last_step}: {_figures(record)}{extra}", file=sys.stderr, flush=True)
        if "valid_lm_loss" in record:
            self.say(f"step {record['step']}/{self._last_step}: validation LM loss {record['valid_lm_loss']:.4f}")

    def say(self, sentence: str) -> None:
        """Print a notice above the bar."""
        if self._bar is not None:
            self._bar.write(sentence, file=sys.stderr)
        else:
            print(sentence, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar where it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class SilentConsole(Console):
    """What the other processes of a run have: the first one speaks for all."""

    def __init__(self) -> None:
        self._bar = None

    def step(self, record: Mapping[str, Any]) -> None:
        """Show nothing."""

    def say(self, sentence: str) -> None:
        """Print nothing."""


def _terminal_width() -> int:
    """Columns of the terminal; 0 where it does not know, as in many containers."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def _figures(record: Mapping[str, Any]) -> str:
    parts = [f"LM loss {record['lm_loss']:.4f}"]
    if record.get("indexer_loss") is not None:
        parts.append(f"indexer loss {record['indexer_loss']:.4f}")
    if record.get("load_balancing_loss") is not None:
        parts.append(f"load balancing loss {record['load_balancing_loss']:.4f}")
    if record.get("dsa_attention_mass") is not None:
        parts.append(f"mass {record['dsa_attention_mass']:.3f}")
    parts.append(f"{rate(record['tokens_per_second'])} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return ", ".join(parts)
