"""What all ranks must know before the next collective: rank 0's answer, every rank's own, or a request to stop.

An error that one rank alone raises leaves the others waiting in a collective. So rank 0's error is sent, and raised on
all of them. Example for P = 3: `from_first_rank(f)` calls f on rank 0 alone; all three ranks return its result, or all
three raise its error. `any_rank(flag)` is true on all three ranks where one has raised its flag. Without
torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opensora_accel.communications import gather_objects

T = TypeVar("T")

# One Ctrl-C reaches a rank twice, from the terminal and from the launcher; what comes within this time is one.
ONE_PRESS_S = 3.0


def is_first_rank() -> bool:
    """Whether this is rank 0 of the job; known before torch.distributed has started, too."""
    return os.environ.get("RANK", "0") == "0"


def from_first_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `function` gives on rank 0 of the group, on all of its ranks.

    Communication: one object broadcast.

    Raises:
        Exception: what `function` raises on rank 0. ValueError and OSError keep their type on the other ranks; any
            other error is a RuntimeError there.
    """
    if not dist.is_initialized():
        return function()
    first = dist.get_global_rank(group, 0) if group is not None else 0
    box: list[Any] = [None, None]
    if dist.get_rank() == first:
        try:
            box[0] = function()
        except Exception as error:
            # The others wait in the broadcast: they must hear of it before this rank raises.
            known = isinstance(error, (ValueError, OSError))
            box[1] = error if known else RuntimeError(f"rank 0: {type(error).__name__}: {error}")
            dist.broadcast_object_list(box, src=first, group=group)
            raise
    dist.broadcast_object_list(box, src=first, group=group)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result


def from_first_of_machine(function: Callable[[], T]) -> T:
    """What `function` gives on the first rank of each machine, on all ranks of that machine.

    Communication: two object all-gathers.

    Raises:
        ValueError, OSError: on all ranks of the job, where `function` raises one of them on one machine.
    """
    hosts = gather_objects(socket.gethostname())
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    first, outcome, error = hosts.index(hosts[own_rank]), None, None
    if own_rank == first:
        try:
            outcome = function()
        except (ValueError, OSError) as problem:
            error = problem
    everyones = gather_objects((outcome, error))
    for _, failure in everyones:
        if failure is not None:
            raise failure
    result: Any = everyones[first][0]
    return result


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag of any rank is true.

    Communication: an all-reduce of one number, on the host where there is gloo: on a GPU, every batch would wait for
    the one before.
    """
    if not dist.is_initialized():
        return flag
    on_host = "gloo" in dist.get_backend_config(group)
    total = torch.tensor(float(flag), device="cpu" if on_host else torch.device("cuda"))
    dist.all_reduce(total, group=group)
    return total.item() > 0


class StopRequest:
    """Within it, the first signal sets `requested`, and a Ctrl-C that comes clearly later interrupts at once.

    SIGINT, SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (a scheduler's warning) all ask for the same: end with a
    saved state. A signal reaches one rank, so whoever reads `requested` asks `any_rank`.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = False
        self._first_time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in self._SIGNALS:
            # Who starts a run under nohup, where SIGHUP is ignored, wants it to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_time = True, now
            if is_first_rank():
                line = (
                    f"{signal.Signals(number).name}: finishing this microbatch, then saving and stopping "
                    "(Ctrl-C again stops at once, without saving)\n"
                )
                # Not print(): the signal may have come within one, and print refuses to be entered twice.
                os.write(2, line.encode())
        elif number == signal.SIGINT and now - self._first_time > ONE_PRESS_S:
            raise KeyboardInterrupt
