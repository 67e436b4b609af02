"""``pretrain_gpt`` whose rank 1 fails in a given step: ``-m tests.functional_tests.failing_run HOW STEP FLAGS``.

It says on stderr when it fails, in seconds since the epoch.
"""

import os
import signal
import sys
import time
from typing import Any

from megatron.training import trainer
from megatron.training.pretrain_gpt import main


def _fail(how: str) -> None:
    print(f"failing at {time.time()}", file=sys.stderr, flush=True)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "asked":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if how == "raises":
        raise RuntimeError("the lamp went out")
    raise OSError("the disk went away")


def _break(how: str, step: int) -> None:
    calls, original = [0], trainer.train_step

    def train_step(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == step and os.environ["RANK"] == "1" and how in ("dies", "raises", "asked"):
            _fail(how)
        return original(*arguments)

    trainer.train_step = train_step
    stream_of, streams = trainer.batches, []

    def batches(*arguments: Any) -> Any:
        evaluates = len(streams) > 0
        streams.append(arguments)
        for number, batch in enumerate(stream_of(*arguments), 1):
            if os.environ["RANK"] == "1" and number == 2 * step and how == "cannot-read":
                _fail(how)
            if os.environ["RANK"] == "1" and number == 4 and how == "asked-in-evaluation" and evaluates:
                _fail("asked")
            yield batch

    trainer.batches = batches


if __name__ == "__main__":
    _break(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
