"""Five training runs with one thing wrong on purpose, and what the report of each says first.

    python tools/profile_cases.py --out runs/profile_cases

Two ranks of this machine train a small video transformer, some ten seconds a case. What is made wrong is real: a
dataset that answers late, sockets whose rate the kernel limits, longer clips on one rank. Nothing is written into the
records but what the profiler saw.

    case               what is made wrong                                      what the report has to say
    slow data          rank 1's dataset sleeps before it answers               slow data, rank 1
    exposed ring       keys and values travel over links of 20 MB/s            exposed communication, ring
    optimizer's peak   AdamW steps on copies of all weights at once            memory peak, in the optimizer
    imbalance          rank 1 gets clips of three times the frames             imbalance, rank 1
    congested link     for a third of the steps one link has a fifth of that   slow link, from rank 0 to rank 1
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.pages import charts
from opensora_accel.profiler import profile, region
from opensora_accel.profiler.report import write_report
from opensora_accel.verify.pool import RankPool

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS, NUM_STEPS = 2, 18
# A fifth of a link of 1 Gbit/s, so that the network is the limit on any machine.
LINK_BYTES_PER_S = 20_000_000
CONGESTED_STEPS = range(7, 13)
# Not in Python's socket module; from Linux' asm-generic/socket.h.
SO_MAX_PACING_RATE, NO_LIMIT = 47, 2**31 - 1


@dataclass(frozen=True)
class Case:
    """One thing that is made wrong, and the finding that has to come first."""

    plan: Plan
    made: str
    kind: str
    ranks: tuple[int, ...]
    axis: str = ""
    # Clips [C, F, H, W] of each rank.
    frames: tuple[int, int] = (3, 3)
    size: int = 20
    late_s: float = 0.0
    link_bytes_per_s: int = 0
    is_congested: bool = False
    follows_memory: bool = False
    # The picture of the report that shows it.
    chart: str = "steps"


CASES = {
    "slow data": Case(
        Plan(dp_replicate=2), "rank 1's dataset sleeps 0.3 s before it answers", "slow data", (1,), late_s=0.3
    ),
    "exposed ring": Case(
        Plan(ring=2),
        f"keys and values travel over links of {LINK_BYTES_PER_S / 1e6:.0f} MB/s",
        "exposed communication",
        (),
        "ring",
        link_bytes_per_s=LINK_BYTES_PER_S,
        chart="axes",
    ),
    "optimizer's peak": Case(
        Plan(dp_replicate=2, checkpoint="full"),
        "AdamW(foreach=True) makes temporary copies of all weights at once",
        "memory peak",
        (),
        size=12,
        follows_memory=True,
        chart="memory",
    ),
    "imbalance": Case(
        Plan(dp_replicate=2), "rank 1 gets clips of three times the frames", "imbalance", (1,), frames=(2, 6)
    ),
    "congested link": Case(
        Plan(ring=2),
        f"from step {CONGESTED_STEPS[0]} to {CONGESTED_STEPS[-1]} the link from rank 0 to rank 1 has a fifth of its "
        f"{LINK_BYTES_PER_S / 1e6:.0f} MB/s",
        "slow link",  # on one machine
        (0, 1),
        "ring",
        link_bytes_per_s=LINK_BYTES_PER_S,
        is_congested=True,
        chart="over",
    ),
}


class Clips(Dataset[torch.Tensor]):
    """Latents [C, F, H, W]; `late_s` is what a slow disk, or a decoder of long videos, takes for each."""

    def __init__(self, case: Case, rank: int):
        # Ranks of a ring share a sample, so that both have the same frames.
        self.shape = (16, case.frames[rank], case.size, case.size)
        self.late_s = case.late_s if rank == 1 else 0.0

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.late_s)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(index))


def links_to(rank: int) -> list[socket.socket]:
    """Copies of this process' connections to another rank; all ranks call it together.

    gloo has a connection for each pair of ranks of a group. Its other end belongs to the process that has a socket of
    that address.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(name)))
                connection.getpeername()
                found.append(connection)
        except OSError:
            continue  # not connected, or gone
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, [str(each.getsockname()) for each in found])
    return [each for each in found if str(each.getpeername()) in addresses[rank]]


def limit(links: list[socket.socket], bytes_per_s: int) -> None:
    """Lets the kernel send no faster over these connections."""
    for link in links:
        link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)


def train(name: str, folder: Path) -> None:
    """One rank's part of a case: the loop that a user would write, under `profile`."""
    case, rank = CASES[name], dist.get_rank()
    parallel_states.reset()
    GLOBAL_ACTIVATION_MANAGER.close()
    init_parallel(case.plan)
    torch.manual_seed(0)
    model = build_model(case)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3, foreach=True)
    loader = DataLoader(Clips(case, rank), batch_size=1)
    text = torch.zeros(1, 16, 64)
    links = links_to(1 - rank) if case.link_bytes_per_s else []
    limit(links, case.link_bytes_per_s)
    memory_steps = [NUM_STEPS] if case.follows_memory else []
    with profile(model, case.plan, folder, optimizer=optimizer, memory_steps=memory_steps) as run:
        for number, latents in enumerate(in_region("data", loader), start=1):
            if case.is_congested and rank == 0:
                is_slow = number in CONGESTED_STEPS
                limit(links, case.link_bytes_per_s // 5 if is_slow else case.link_bytes_per_s)
            (out,) = wrapped(latents, torch.tensor([500]), text, return_dict=False)
            loss = (out - latents).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss.detach(), tokens=latents[0, 0].numel() / 4)
    limit(links, NO_LIMIT)  # the connections are there for the next case too
    for link in links:
        link.close()  # a copy of gloo's, which stays open
    dist.barrier()


def build_model(case: Case) -> nn.Module:
    """A small model of diffusers, sharded."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=6, attention_head_dim=64, ffn_dim=1024, num_layers=4, text_dim=64, freq_dim=64
    )
    if case.link_bytes_per_s:
        # Like an adapter, so that keys and values are all but everything that travels.
        model.requires_grad_(False)
        model.patch_embedding.requires_grad_(True)
    return shardformer.shard(model, case.plan)


def in_region(kind: Any, values: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same values; what each takes to come counts as this region."""
    iterator = iter(values)
    while True:
        with region(kind):
            value = next(iterator, None)
        if value is None:
            return
        yield value


def picture(run: dict[str, Any], chart: str) -> str:
    """The picture of the report's page as a file of its own, on white."""
    if chart == "steps":
        svg = charts.step_breakdown(run["ranks"], "case-steps")
    elif chart == "axes":
        svg = charts.axes_bars(run["axes"], "case-axes")
    elif chart == "memory":
        svg = charts.memory_timeline(run["memory"], "case-memory")
    else:
        svg = charts.over_steps(run["steps"], "seconds", "seconds", "case-over")
    # Text that no page escapes again; and without the one for a telephone, which stands behind it on a page.
    svg, end, _telephone = str(svg).partition("</svg>")
    svg += end
    for variable, colour in {"ink": "#1c2126", "line": "#c9ced4", "surface": "#ffffff"}.items():
        svg = svg.replace(f"var(--{variable})", colour)
    return (
        re.sub(r"(<svg [^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', svg, count=1) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/profile_cases"), help="folder of records and pages"
    )
    parser.add_argument("--pictures", type=Path, help="folder that gets a picture of each, case_*.svg")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if not sys.platform.startswith("linux"):
        parser.error("links are limited by a socket option of Linux")
    wrong = 0
    with RankPool(NUM_RANKS) as pool:
        for name in options.cases or CASES:
            case, folder = CASES[name], options.out / name.replace("'", "").replace(" ", "_")
            pool(NUM_RANKS, train, name, folder)
            (run,) = write_report([folder], folder / "report.html", label=f"{name}: {case.made}")["runs"]
            first = next((each for each in run["findings"] if each["kind"] == case.kind), None)
            if case.kind != "memory peak":  # it costs no time, and so comes last
                first = next(iter(run["findings"]), None)
            is_right = first is not None and first["kind"] == case.kind and first["axis"] == case.axis
            is_right = is_right and (not case.ranks or tuple(first["ranks"]) == case.ranks)
            wrong += not is_right
            print(f"{name}: {case.made}\n  the report says: {first['text'] if first else 'nothing'}")
            print(
                f"  {'as it should' if is_right else 'WRONG'}; the page: {folder / 'report.html'}", flush=True
            )
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                path = options.pictures / f"case_{folder.name}.svg"
                path.write_text(picture(run, case.chart), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
