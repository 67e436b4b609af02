"""Train a GPT: ``python -m megatron.training.pretrain_gpt --help``, or the same under torchrun.

Exit codes: 0 done, or stopped as asked; 1 stopped by what came up on the way (a loss that is not finite, data that
cannot be read, a full disk); 2 a command line, data file or checkpoint that cannot be used, said in one sentence before
anything is created. Of several processes under torchrun, one that fails ends at once, and torchrun ends the others.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megatron.training.arguments import PROGRAM, PretrainConfig, parse_args
from megatron.training.config import DistributedConfig
from megatron.training.launcher import is_alone, read_launch
from megatron.training.path_arguments import require_writable
from megatron.training.prepare import prepare
from megatron.training.ranks import leave, on_first_rank, rank, report_crash, wait_for_the_first, world_size
from megatron.training.run_lock import held
from megatron.training.trainer import Trainer
from megatron.training.validate import complete, device_of


@contextmanager
def process_group(config: DistributedConfig, device: torch.device) -> Iterator[None]:
    """Join torchrun's group of processes, if it started this one."""
    if not read_launch().joins:
        yield
        return
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    torch.distributed.init_process_group(backend, timeout=timeout)
    try:
        yield
        torch.distributed.barrier()  # nobody hangs up on a rank that is still reading its last message
    finally:
        torch.distributed.destroy_process_group()


def start(config: PretrainConfig, stack: ExitStack, places: ExitStack | None = None) -> Trainer:
    """A trainer that is ready to run; ``stack`` ends what the run needs around it.

    A process of several that fails ends without its group. So it can be given ``places``, which ends the hold on
    directories in place of ``stack``.

    Raises:
        ValueError: one sentence about what cannot be used; nothing has been created.
    """
    _require_places(config)
    config, tokenizer = complete(config)
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stack.enter_context(process_group(config.distributed, device))
    config = _hold_places(config, places or stack)
    return Trainer(prepare(config, tokenizer, device))


def _hold_places(config: PretrainConfig, places: ExitStack) -> PretrainConfig:
    """Keep other runs out of what this one writes; an evaluation alone touches nothing of the training's."""
    written = {"--save": config.checkpoint.save, "--log-dir": config.logging.log_dir}
    folders = {flag: Path(place) for flag, place in written.items() if place and not config.training.skip_train}
    notices: list[str] = []
    on_first_rank(lambda: notices.extend(places.enter_context(held(folders))))
    return dataclasses.replace(config, notices=(*config.notices, *notices))


def _require_places(config: PretrainConfig) -> None:
    """Every process writes its shards of a checkpoint; the first one alone writes the rest."""
    places = {"--save": config.checkpoint.save}
    if read_launch().rank == 0:
        logging = config.logging
        places |= {"--log-dir": logging.log_dir, "--tensorboard-dir": logging.tensorboard_dir}
        places["--wandb-save-dir"] = logging.wandb_save_dir
    for flag, place in places.items():
        if place is not None:
            require_writable(flag, place)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    with ExitStack() as stack:
        with ExitStack() as places:
            code = _run(sys.argv[1:] if arguments is None else arguments, stack, places)
        return leave(code)


def _run(arguments: Sequence[str], stack: ExitStack, places: ExitStack) -> int:
    try:
        trainer = start(parse_args(arguments), stack, places)
    except (ValueError, OSError) as error:
        wait_for_the_first()
        where = f"rank {rank()}: " if world_size() > 1 else ""
        print(f"{PROGRAM}: {where}{error}", file=sys.stderr)
        return 2
    try:
        return trainer.run()
    except Exception as error:
        if world_size() == 1:
            raise
        report_crash(error)
        return 1


def exit_at_once(code: int) -> None:
    """End this process. Several ranks skip the interpreter's tear-down, in which Gloo's threads may abort."""
    if not is_alone():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    exit_at_once(main())
