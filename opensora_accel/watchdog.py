"""What this rank does, for ranks that ask: the collective it waits in, or the line its program is at.

A rank whose collective failed sets a key in the job's store. A thread of every rank looks at the key twice a second
and writes its answer. Which collective a rank waits in is read from torch's flight recorder, which knows those of every
group, FSDP's too; sends and receives, which gloo's recorder leaves out, are known from `waiting`.

NCCL ends a process whose collective is overdue, and raises nothing. There the thread speaks up before: it prints what
a failure would say, some seconds before the timeout is over.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

# What the main thread is in, outermost first; `waiting` keeps it.
entered: list[tuple[str, dist.ProcessGroup]] = []

_PREFIX = "opensora_accel"
_TORCH = os.path.dirname(torch.__file__)
_COMMUNICATIONS = os.path.join(os.path.dirname(__file__), "communications")
_POLL_S = 0.5
_NAME = "opensora_accel watchdog"
# How long a rank that failed waits for what the others answer.
PATIENCE_S = 3.0
# So long before a timeout of NCCL is over it is reported; asking takes up to three seconds.
_EARLY_S = 5.0
# Groups that threads use beside the training, which wait without a fault.
BACKGROUND = "in the background"

# The connection to the store while the thread runs, and what ends it. Groups are not kept: they end with their last
# holder, and not in a thread.
_store: dist.Store | None = None
_stop = threading.Event()
_has_failed = False


def start_watchdog() -> None:
    """Starts the thread that answers; `init_parallel` calls it when the groups are there."""
    global _store, _stop, _has_failed
    # Called again after groups were made anew, it leaves no thread of the old ones behind.
    stop_watchdog()
    # One rank waits for nobody, and the other ranks of a fake group do not exist.
    if dist.get_world_size() == 1 or "fake" in dist.get_backend():
        return
    # A connection of its own: the program may wait in the store, for a group that is being made.
    _store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    _stop, _has_failed = threading.Event(), False
    threading.Thread(target=_answer, args=(_store, _stop), name=_NAME, daemon=True).start()


def stop_watchdog() -> None:
    """Ends the thread; `parallel_states.reset` calls it."""
    global _store
    _store = None
    _stop.set()


@atexit.register
def _end() -> None:
    # A thread that comes back from torch while Python ends would abort the process.
    stop_watchdog()
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(_POLL_S)


def _answer(store: dist.Store, stop: threading.Event) -> None:
    answered = has_warned = False
    while not stop.wait(_POLL_S) and dist.is_initialized():
        try:
            # Once, and never in the place of what a rank that failed has said of itself.
            if not answered and not _has_failed and store.check([_key("asked")]):
                store.set(_key(dist.get_rank()), _whereabouts())
                answered = True
            late = overdue(_trace(only_active=True), time.time_ns()) if "nccl" in dist.get_backend() else None
            if late is not None and not has_warned:
                has_warned = True
                operation, name, seconds = late
                group = next(group for group, known in _names().items() if known == name)
                print(f"after {seconds:.0f} s {explanation(operation, group)}", file=sys.stderr, flush=True)
        except (RuntimeError, ValueError):
            return  # the store or the groups are gone: the job ends


def answer(what: str) -> None:
    """Says what this rank does; stays true, because it waits no more. Raises: RuntimeError: the store is gone."""
    global _has_failed
    _has_failed = True
    _any_store().set(_key(dist.get_rank()), what)


def explanation(operation: str, group: dist.ProcessGroup) -> str:
    """Why an operation of this rank failed, by what the other ranks of its group answer within `PATIENCE_S`."""
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    mine = f"waits in {operation} over the {named(ranks)}"
    failure = f"{operation} over the {named(ranks)} failed on rank {me}"
    others = [rank for rank in ranks if rank != me]
    try:
        answer(mine)
        store = _any_store()
        store.set(_key("asked"), "")
        # Asked again and again, because a wait in the store raises where one of them never answers.
        deadline = time.monotonic() + PATIENCE_S
        while not store.check([_key(rank) for rank in others]) and time.monotonic() < deadline:
            time.sleep(0.05)
        answers = {rank: store.get(_key(rank)).decode() for rank in others if store.check([_key(rank)])}
    except RuntimeError as error:
        return f"{failure}, and rank 0's store cannot be asked who is missing: {error}"
    doing: dict[str, list[int]] = {}
    for rank in others:
        what = answers.get(rank, "did not come and does not answer: it has ended, or is stopped")
        doing.setdefault(what.replace("is at ", "did not come: it is at ", 1), []).append(rank)
    # Whoever waits in the same collective is not the reason that it failed.
    doing.pop(mine, None)
    if not doing:
        return f"{failure}, though every rank came"
    # What says more stands first: a rank that failed or did not come, then those that wait elsewhere.
    listed = sorted(doing.items(), key=lambda item: (item[0].startswith("waits"), item[1]))
    return f"{failure}: " + "; ".join(f"{named(those, 'rank')} {what}" for what, those in listed)


def named(ranks: Sequence[int], what: str = "ranks") -> str:
    """Ranks as one writes them: "ranks 0, 1, 4-7"; with what="rank", "rank 3" or "ranks 2, 3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [", ".join(map(str, run)) if len(run) < 4 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{what if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def overdue(trace: Mapping[str, Any], now_ns: int) -> tuple[str, str, float] | None:
    """The collective of a flight recorder's trace whose timeout is all but over: operation, group's name, seconds."""
    for entry in _active(trace):
        waited_s = (now_ns - entry["time_created_ns"]) / 1e9
        if waited_s > entry["timeout_ms"] / 1e3 - _EARLY_S:
            return _operation(entry), entry["process_group"][0], waited_s
    return None


def _whereabouts() -> str:
    ranks_of = {name: dist.get_process_group_ranks(group) for group, name in _names().items()}
    # The last one: collectives that run beside others are waited for at their end.
    for entry in reversed(_active(_trace(only_active=False))):
        name, description = entry["process_group"]
        if description != BACKGROUND and name in ranks_of:
            return f"waits in {_operation(entry)} over the {named(ranks_of[name])}"
    inner = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [frame for frame, _ in traceback.walk_stack(inner)] if inner is not None else []
    # Also where the operation has just failed here as well, and this rank is about to ask in its turn.
    if entered and any(frame.f_code.co_filename.startswith(_COMMUNICATIONS) for frame in frames):
        operation, group = entered[-1]
        return f"waits in {operation} over the {named(dist.get_process_group_ranks(group))}"
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_TORCH):  # where the program called torch
            return f"is at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
    return "is at its end"


def _trace(only_active: bool) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(_dump_fr_trace_json(True, only_active))
    return trace


def _active(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries that have begun and not ended; gloo's recorder marks the end alone."""
    return [
        entry for entry in trace.get("entries", ()) if not entry["retired"] and entry["state"] != "completed"
    ]


def _operation(entry: Mapping[str, Any]) -> str:
    """`all_gather` of "gloo:all_gather" or "nccl:all_gather"."""
    return str(entry["profiling_name"]).rpartition(":")[2]


def _names() -> dict[dist.ProcessGroup, str]:
    return dict(dist.distributed_c10d._world.pg_names)


def _key(what: object) -> str:
    # Under torchrun the store outlives a restart, and still holds what was answered before it.
    return f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"


def _any_store() -> dist.Store:
    return _store if _store is not None else dist.distributed_c10d._get_default_store()
