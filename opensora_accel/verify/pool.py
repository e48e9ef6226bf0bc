"""A pool of ranks on this machine: its processes start once, and a job then takes milliseconds."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_HAS_SIGMASK = hasattr(signal, "pthread_sigmask")  # not on Windows
_ENDED = (
    "the process ended without an answer, with status {status}: the backend aborted it, what it ran ended it, or it is "
    'a script that starts ranks while it is imported (put the call under `if __name__ == "__main__":`)'
)


class RankError(Exception):
    """A job failed on at least one rank; the message holds every rank's traceback, `errors` each by itself."""

    def __init__(self, errors: dict[int, str]):
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))


class RankPool:
    """Calls module-level functions on the ranks of a fresh world, again and again.

    Args:
        size: how many processes there may be; each starts when it is first needed.
        timeout_s: how long a job may take; past it the ranks that have not answered count as hanging.
        collective_timeout_s: how long one collective may wait.
        grace_s: how long the other ranks may take to notice that one of them failed.
        preload: modules that are imported once for all processes, where the platform can fork a clean one.
        device_type: "cuda" gives each rank the GPU of its number, and NCCL beside gloo.
    """

    def __init__(
        self,
        size: int = 6,
        *,
        timeout_s: float = 240,
        collective_timeout_s: float = 60,
        grace_s: float = 15,
        preload: Sequence[str] = (),
        device_type: str = "cpu",
    ):
        self.size, self.timeout_s = size, timeout_s
        self.collective_timeout_s, self.grace_s = collective_timeout_s, grace_s
        self._device_type = device_type
        # Never forked from this process: that would inherit autograd's threads. A server that has only imported
        # has none.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__, *preload, "opensora_accel.verify.frozen"])
        # One store for all jobs; each job's keys have a prefix of their own.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[Any, Connection] | None] = [None] * size
        self._logs = tempfile.TemporaryDirectory(prefix="opensora-accel-ranks-")
        self._job = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def patience(self, timeout_s: float, grace_s: float) -> Iterator[None]:
        """Within it, jobs and collectives may take `timeout_s`."""
        before = self.timeout_s, self.collective_timeout_s, self.grace_s
        self.timeout_s, self.collective_timeout_s, self.grace_s = timeout_s, timeout_s, grace_s
        try:
            yield
        finally:
            self.timeout_s, self.collective_timeout_s, self.grace_s = before

    def _worker(self, rank: int) -> Connection:
        worker = self._workers[rank]
        if worker is None or not worker[0].is_alive():
            here, there = self._context.Pipe()
            arguments = (there, self._store.port, self._log(rank), self._device_type)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            # Ctrl-C waits. A process that starts keeps it waiting, until `_serve` has left the terminal.
            resource_tracker.ensure_running()  # which would unblock it, were it started below
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _HAS_SIGMASK else set()
            try:
                process.start()
            finally:
                if _HAS_SIGMASK:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()
            worker = self._workers[rank] = (process, here)
        return worker[1]

    def __call__(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
    ) -> list[Any]:
        """`function(*args)` on every rank of a fresh world of `num_ranks`; their return values in rank order.

        Raises:
            ValueError: the pool has fewer ranks, or the function or its arguments cannot be sent.
            RankError: the job failed on a rank, or a rank did not answer in time.
        """
        if not 1 <= num_ranks <= self.size:
            raise ValueError(f"this pool has up to {self.size} ranks; {num_ranks} were asked for")
        self._job += 1  # also of a job that cannot be sent: no prefix is used twice
        job = (self._job, num_ranks, self.collective_timeout_s, env or {}, function, args)
        try:
            message = pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{getattr(function, '__qualname__', function)!s} and its arguments go to other processes, which needs "
                f"functions defined at the top level of a module or script, no lambda or closure: {error}"
            ) from error
        # Pickled once, before anything is sent: a job that cannot be sent must not start on some ranks.
        connections = [self._worker(rank) for rank in range(num_ranks)]
        for rank, connection in enumerate(connections):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_collect` will say so
                connection.send_bytes(pickle.dumps(rank))
                connection.send_bytes(message)
        return self._collect(connections)

    def _collect(self, connections: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout_s
        # Answers in whatever order they come: a rank that failed must not be waited for behind one that hangs.
        while len(results) + len(errors) < len(connections):
            pending = [c for r, c in enumerate(connections) if r not in results and r not in errors]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections.index(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    # What C++ code wrote to stderr in the rank's process.
                    log = Path(self._log(rank))
                    words = log.read_text(errors="replace").strip() if log.exists() else ""
                    process = self._workers[rank][0]  # type: ignore[index]
                    process.join(self.grace_s)
                    succeeded, value = False, f"{_ENDED.format(status=process.exitcode)}\n{words}"
                (results if succeeded else errors)[rank] = value
            # The others mostly wait for the one that failed, and notice by its closed sockets.
            if errors:
                deadline = min(deadline, time.monotonic() + self.grace_s)
        for rank in range(len(connections)):
            if rank not in results and rank not in errors:
                errors[rank] = "no answer: hangs"
            if rank in errors:  # it may still be in a collective, and its state is anybody's guess
                self._stop(rank)
        if errors:
            raise RankError(errors)
        return [results[rank] for rank in range(len(connections))]

    def _log(self, rank: int) -> str:
        return os.path.join(self._logs.name, f"{rank}.txt")

    def _stop(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is not None:
            worker[0].kill()
            worker[0].join()
            worker[1].close()
        self._workers[rank] = None

    def renew(self, num_ranks: int | None = None) -> None:
        """The processes of these ranks (default: of all) start anew before their next job."""
        for rank in range(self.size if num_ranks is None else num_ranks):
            self._stop(rank)

    def close(self) -> None:
        self.renew()
        self._logs.cleanup()


def _serve(connection: Connection, port: int, log: str, device_type: str) -> None:
    """The life of a process: one job after another, until the pool closes or its process ends."""
    if _HAS_SIGMASK:
        # Ctrl-C no longer reaches this process: whoever has the pool ends it. What is sent to it alone still does.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that came before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What C++ code writes to stderr goes to the log: gloo's last words, before it aborts. Python's still are seen.
    sys.stderr.flush()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except FileNotFoundError:  # the pool was closed before this process had begun
        return
    seen = os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = os.fdopen(seen, "w", buffering=1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Oversubscribed, a model of 3 ms takes 200 ms (2 cores, torch 2.13, 2026-11).
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # The pool's end of the pipe is closed when the pool is.
    while True:
        try:
            rank, message = pickle.loads(connection.recv_bytes()), connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_run_job(rank, message, store, device_type))


def _end_with_parent() -> None:
    """Ends this process with its parent, also in the middle of a job, and where the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _told(error: BaseException) -> str:
    """The traceback from the first line on that is not of this folder; of what is refused here, the message alone."""
    own, left = os.path.dirname(__file__), error.__traceback__
    while left is not None and os.path.dirname(left.tb_frame.f_code.co_filename) == own:
        left = left.tb_next
    if left is None and isinstance(error, ValueError):
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, left or error.__traceback__))


def _run_job(rank: int, message: bytes, store: dist.Store, device_type: str) -> bytes:
    environment = dict(os.environ)
    set_modules_aside()
    try:
        job, num_ranks, timeout_s, env, function, args = pickle.loads(message)
        os.environ.update(env)
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"job{job}", store),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        return pickle.dumps((True, function(*args)))
    except BaseException as error:  # noqa: BLE001 - whatever it was, the main process must hear of it
        return pickle.dumps((False, _told(error)))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _forget_process_groups()


_num_frozen_modules = 0


def set_modules_aside() -> None:
    """What was imported need not be searched for garbage after every job, or in every test: it takes 0.3 s each time.

    Not before each job: what the last one has left is garbage as soon as a cache lets go of it, and what is frozen by
    then is never freed.
    """
    global _num_frozen_modules
    if len(sys.modules) > _num_frozen_modules + 50:
        gc.collect()
        gc.freeze()
        _num_frozen_modules = len(sys.modules)


def _forget_compiled_graphs() -> None:
    """Empties the names under which the compiler leaves each graph in the module whose code it compiled.

    A graph holds the groups that it sends over, and torch 2.13 leaves it there when it is reset. The names stay, for
    its own clean-up to take them away.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name in names if name.startswith("__compiled_fn_")]:
            names[name] = None


# The process groups of the last job, which are freed at the end of the next one.
_last_groups: list[Any] = []


def _forget_process_groups() -> None:
    """Ends this job's process groups, and frees those of the job before.

    Models under DDP and FSDP lie in reference cycles and hold their groups, each with threads of gloo that wake up
    every now and then: uncollected, a rank has a thousand of them after a hundred jobs. But a group that is freed
    joins its threads while Python's lock is held, and a thread that has just finished a collective may wait for that
    lock to free its tensors: both wait for ever. After one more job the threads have nothing left to do.
    """
    from opensora_accel import parallel_states

    groups = list(dist.distributed_c10d._world.pg_map)
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        has_compiled = bool(compiler.eval_frame.cached_backends)
        compiler.reset()  # what was compiled is kept with its models
        if has_compiled:  # a search through all modules takes 25 ms
            _forget_compiled_graphs()
    parallel_states.reset(destroy_process_group=True)
    gc.collect()
    _last_groups[:] = groups
