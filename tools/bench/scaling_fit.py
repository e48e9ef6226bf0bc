"""What limits scaling, fitted to what was measured, and what more ranks would take.

A step on P ranks takes time_P; its speed-up is work_P / time_P, both in units of one rank. With a share s of the step
that more ranks do not make shorter:

    strong (Amdahl)       the work stays           1 / speed-up = s + (1 − s) / P
    weak (Gustafson)      the work grows with P    speed-up = s + (1 − s) · P

So a speed-up of 1.6 on 2 ranks is s = 0.25 by the first, and s = 0.4 by the second. Twice fitted, once to the step and
once to the step without what it waited for (for the network, and for later ranks), s tells whether the rest of the
code or communication is the limit. In the place of P stands what computes: 4 ranks on 2 cores are 2.

A transfer takes a latency for each call and a time for each byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class Point:
    """A step of one strategy on some ranks."""

    ranks: int
    # Devices, or cores of a CPU, that compute for them.
    workers: int
    # Useful FLOPs and time of the step of all ranks, in units of one rank's step.
    work: float
    time: float
    # Shares of the step in which compute waits: for the network, and for ranks that come later.
    network: float = 0.0
    waited: float = 0.0

    @property
    def speed_up(self) -> float:
        return self.work / self.time

    def without_communication(self) -> Point:
        return Point(self.ranks, self.workers, self.work, self.time * (1 - self.network - self.waited))


@dataclass(frozen=True)
class Link:
    """What a call costs, and a byte."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, calls: float, sent_bytes: float) -> float:
        return calls * self.latency_s + sent_bytes / self.bytes_per_s


def serial_share(mode: Mode, points: Sequence[Point]) -> float | None:
    """The share s that fits best (least squares); None where nothing has more than one worker.

    It is below 0 where ranks together are faster than they should be: shorter sequences fit a cache.
    """
    above = below = 0.0
    for point in points:
        if mode == "strong":
            found, ideal = 1 / point.speed_up, 1 / point.workers
        else:
            found, ideal = point.speed_up, float(point.workers)
        # found − ideal = s · (1 − ideal)
        above += (found - ideal) * (1 - ideal)
        below += (1 - ideal) ** 2
    return above / below if below else None


def fit_link(transfers: Sequence[tuple[float, float, float]]) -> Link | None:
    """Latency and bandwidth of (calls, bytes, seconds) by least squares, neither below 0; None without bytes."""
    aa = sum(calls * calls for calls, _bytes, _s in transfers)
    ab = sum(calls * size for calls, size, _s in transfers)
    bb = sum(size * size for _calls, size, _s in transfers)
    at = sum(calls * seconds for calls, _bytes, seconds in transfers)
    bt = sum(size * seconds for _calls, size, seconds in transfers)
    if not bb or not bt:
        return None
    determinant = aa * bb - ab * ab
    # Calls and bytes that grow together do not tell latency from bandwidth; then all of it is bandwidth.
    latency_s = (at * bb - bt * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    s_per_byte = (bt - max(0.0, latency_s) * ab) / bb
    if s_per_byte <= 0:
        latency_s, s_per_byte = at / aa, 0.0
    return Link(max(0.0, latency_s), 1 / s_per_byte if s_per_byte > 0 else float("inf"))


def simulated_time(
    mode: Mode,
    point: Point,
    one_rank_s: float,
    serial: float,
    transfer_s: float,
) -> float:
    """Seconds of a step on `point.workers` devices whose serial share, without communication, is `serial`.

    Args:
        point: with the work, and the share of the step that ranks wait for later ones.
        transfer_s: what the network takes, of which nothing is taken to be hidden beyond what was when it was fitted.
    """
    share = max(0.0, serial)
    if mode == "strong":
        compute_s = one_rank_s * point.work * (share + (1 - share) / point.workers)
    else:
        compute_s = one_rank_s * point.work / (share + (1 - share) * point.workers)
    return compute_s / (1 - point.waited) + transfer_s
