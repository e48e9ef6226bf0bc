"""Who did not come: a collective that failed, told with the ranks that were missing.

A collective waits for every rank of its group. Where one does not come (it raised an error, it went another way, it
was stopped), the others learn so when their timeout is over, and the backend says only which socket was silent. So
every rank whose collective failed writes its name into the store that started the job, waits a moment for the others
to do the same, and names those that did not. Of 3 ranks, of which rank 1 validates by itself:

    rank 0: failed in all_to_all, writes 0     rank 2: writes 2     both say: rank 1 did not come

Nothing is written or measured unless a collective fails. NCCL reports a timeout by ending the process, without an
error that could be told here.
"""

from __future__ import annotations

import os
import time
from types import TracebackType

import torch.distributed as dist

# How long a rank that failed waits for others to say that they failed too.
PATIENCE_S = 10.0

_PREFIX = "opensora_accel/failed"


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
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # What was explained further in stays as it is.
        if not isinstance(error, RuntimeError) or isinstance(error, MissingRankError):
            return
        # gloo raises plain RuntimeErrors, which name the line of its source.
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            raise MissingRankError(_explanation(self.operation, self.group, error)) from error


def report_failure(message: str) -> None:
    """Tells the ranks that will wait for this one why it does not come, before it raises."""
    if dist.is_initialized():
        _write(f"failed: {message}")


def _explanation(operation: str, group: dist.ProcessGroup, error: RuntimeError) -> str:
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    told = f"{operation} over the ranks {', '.join(map(str, ranks))} failed on rank {me}"
    others = [rank for rank in ranks if rank != me]
    heard = _hear(operation, others)
    if heard is None:
        return f"{told}, and rank 0's store cannot be asked who is missing: {error}"
    missing = [rank for rank in others if rank not in heard]
    elsewhere = [f"rank {rank} {what}" for rank, what in heard.items() if what != f"waits in {operation}"]
    if missing:
        names = " and ".join(f"rank {rank}" for rank in missing)
        elsewhere.insert(0, f"{names} did not come (ended, stopped, or gone another way)")
    if not elsewhere:
        return f"{told}, though every rank came: {error}"
    return (
        f"{told}: {'; '.join(elsewhere)}. Every rank of a group must call a sharded model, in validation and sampling "
        f"too. Backend: {str(error).splitlines()[0]}"
    )


def _key(rank: int) -> str:
    return f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _write(text: str) -> bool:
    """Whether the store could be reached: the process that holds it may be the one that is gone."""
    try:
        _store().set(_key(dist.get_rank()), text)
    except RuntimeError:
        return False
    return True


def _hear(operation: str, ranks: list[int]) -> dict[int, str] | None:
    """What each of the other ranks that failed too has written; None without a store."""
    if not _write(f"waits in {operation}"):
        return None
    heard: dict[int, str] = {}
    # Ranks notice a failure at different times, by their own timeouts.
    deadline = time.monotonic() + PATIENCE_S
    try:
        while len(heard) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in heard and _store().check([_key(rank)]):
                    heard[rank] = _store().get(_key(rank)).decode()
            time.sleep(0.05)
    except RuntimeError:
        return None
    return heard
