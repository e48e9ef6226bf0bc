"""A pool of gloo processes that lives for the test session: a job takes milliseconds, a spawn takes seconds."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_JOB_TIMEOUT_S = 240
_GRACE_S = 15
"""How long the other ranks may take to notice that one of them failed."""


class RankError(Exception):
    """A job failed on at least one rank; the message holds every rank's traceback."""


class RankPool:
    def __init__(self, size: int = 6):
        # Spawned, not forked: a fork would inherit autograd's threads.
        self._context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[Any, Connection] | None] = [None] * size
        self._job = 0

    def _worker(self, rank: int) -> Connection:
        worker = self._workers[rank]
        if worker is None or not worker[0].is_alive():
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, self._store.port), daemon=True)
            process.start()
            there.close()
            worker = self._workers[rank] = (process, here)
        return worker[1]

    def __call__(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
    ) -> list[Any]:
        """`function(*args)` on every rank of a fresh world of `num_ranks`; their return values in rank order."""
        self._job += 1
        connections = [self._worker(rank) for rank in range(num_ranks)]
        for rank, connection in enumerate(connections):
            job = (self._job, rank, num_ranks, env or {}, function, args)
            connection.send_bytes(pickle.dumps(job))
        return self._collect(connections)

    def _collect(self, connections: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + _JOB_TIMEOUT_S
        while len(results) + len(errors) < len(connections):
            pending = [c for r, c in enumerate(connections) if r not in results and r not in errors]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = connections.index(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process ended without an answer (aborted by the backend?)"
                (results if succeeded else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in range(len(connections)):
            if rank not in results and rank not in errors:
                errors[rank] = "no answer: hangs"
            if rank in errors:
                self._stop(rank)
        if errors:
            raise RankError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(len(connections))]

    def _stop(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is not None:
            worker[0].kill()
            worker[0].join()
            worker[1].close()
        self._workers[rank] = None

    def close(self) -> None:
        for rank in range(len(self._workers)):
            self._stop(rank)


def _serve(connection: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_run_job(message, store))


def _run_job(message: bytes, store: dist.Store) -> bytes:
    environment = dict(os.environ)
    try:
        job, rank, num_ranks, env, function, args = pickle.loads(message)
        os.environ.update(env)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job{job}", store),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        return pickle.dumps((True, function(*args)))
    except BaseException:  # noqa: BLE001 - whatever it was, the main process must hear of it
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _forget_process_groups()


def _forget_process_groups() -> None:
    from opensora_accel import parallel_states

    parallel_states.reset(destroy_process_group=True)
