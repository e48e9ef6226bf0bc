"""Who did not come: a collective that failed, with the ranks that were missing and with what they do instead.

A collective waits for every rank of its group. Where one does not come (it raised an error, it went another way, it
was stopped), the others learn so when their timeout is over, and the backend says only which socket was silent. So a
rank whose collective failed asks all ranks, through the store that started the job, what they are doing. A thread of
each rank (`opensora_accel/watchdog.py`) answers, even where the rank itself waits. Of 3 ranks, of which rank 1
validates by itself and rank 2 waits in the same collective as rank 0, rank 0 says:

    all_to_all over the ranks 0, 1, 2 failed on rank 0: rank 1 did not come: it is at validate.py:41 in score
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import torch
import torch.distributed as dist

from opensora_accel import watchdog


class MissingRankError(RuntimeError):
    """A collective failed because ranks of its group did not take part."""


class waiting:
    """Around a collective of `group`: a failure names the ranks that did not come, and the operation.

    Errors that are not the backend's pass as they are, so that it may stand around more than the collective.

    Raises:
        MissingRankError: in place of the backend's RuntimeError, which is its cause.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup):
        self.operation, self.group = operation, group

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            watchdog.entered.append((self.operation, self.group))

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            # What was explained further in stays as it is.
            if not isinstance(error, RuntimeError) or isinstance(error, MissingRankError):
                return
            # gloo raises plain RuntimeErrors, which name the line of its source.
            if isinstance(error, dist.DistError) or "gloo/" in str(error):
                backend = str(error).splitlines()[0]
                raise MissingRankError(
                    f"{watchdog.explanation(self.operation, self.group)}. Every rank of a group must call a sharded "
                    f"model, in validation and sampling too. Backend: {backend}"
                ) from error
        finally:
            # Not before: a rank that asks meanwhile is to hear of this operation.
            watchdog.entered.pop()


def report_failure(message: str) -> None:
    """Tells the ranks that will wait for this one why it does not come, before it raises."""
    if dist.is_initialized():
        # Where rank 0's store is gone nobody can hear of it.
        with suppress(RuntimeError):
            watchdog.answer(f"failed: {message}")
