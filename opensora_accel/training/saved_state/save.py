"""Writes saved states beside the training.

A thread of each rank copies the shards that the rank holds to host memory, while the next step runs forward and
backward; only its optimizer waits for the copy, on a GPU without the host (page-locked memory and a stream of its own).
Then the thread writes. Each tensor has an owner, the rank with the fewest bytes to write so far; the ranks of its copy
send their shards there, over a group of gloo that nothing else uses, and the owner writes the tensor whole. Rank 0's
thread hears through torch's store how the others fared, writes the manifest last and gives the folder its name. P = 2,
one weight of 4 rows and one of 2:

    rank 0    stages rows 0, 1 and row 0    receives rows 2, 3 of the first     writes the first
    rank 1    stages rows 2, 3 and row 1    receives row 0 of the second        writes the second
"""

from __future__ import annotations

import datetime
import heapq
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from opensora_accel.deferred import region_of
from opensora_accel.experimental import experiment
from opensora_accel.files import retried, sha256_of
from opensora_accel.offload import allocate_on_host
from opensora_accel.training.adapters import saved_weights
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.optim import EMA, FreeAverage, is_quantized, numbers_of
from opensora_accel.training.ranks import from_first_rank
from opensora_accel.training.saved_state.folder import (
    AVERAGED,
    AVERAGED_2,
    CONFIG,
    MANIFEST,
    MODEL,
    MODEL_2,
    OPTIMIZER_2_STEM,
    OPTIMIZER_STEM,
    PARTIAL,
    STATE,
    WEIGHTS_STEM,
    remove_old,
    remove_partial,
    set_aside,
)
from opensora_accel.watchdog import BACKGROUND

# The name of the threads that write.
SAVING = "saved state"
# What AdamW keeps of a parameter; z is of the one without a schedule, s and p0 are Prodigy's.
ENTRIES = ("exp_avg", "exp_avg_sq", "z", "s", "p0", "step")
_POLL_S = 0.05


@dataclass
class TrainState:
    """What the training of a model is, beyond its configuration."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | FreeAverage | None
    step: int = 0


class Stems(NamedTuple):
    """Where a model lies in a saved state."""

    model: str
    averaged: str
    # Of files.
    optimizer: str


def stems_of(number: int) -> Stems:
    """Those of the first model (0) or of the second (1)."""
    first, second = Stems(MODEL, AVERAGED, OPTIMIZER_STEM), Stems(MODEL_2, AVERAGED_2, OPTIMIZER_2_STEM)
    return (first, second)[number]


@dataclass(frozen=True)
class _Place:
    """Where one tensor goes, and where it comes from."""

    owner: int
    # The ranks that hold the copy which is written: the owner's. Without a mesh the owner has it whole.
    holders: frozenset[int]
    shape: torch.Size
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def region(self, rank: int) -> tuple[slice, ...]:
        """The part of the tensor that a holder has."""
        return () if self.mesh is None else region_of(self.shape, self.mesh, self.placements, rank)


@dataclass
class Saver:
    """Saves one state at a time. Every rank makes one, and calls every method in the same order."""

    # Where the parameters are.
    device: torch.device
    # How long rank 0 waits for the other ranks' files: a rank that died writes none.
    limit_s: float = 1800.0
    _thread: threading.Thread | None = None
    # What became of the save: the error, if there was one. Rank 0 knows those of all ranks.
    _error: Exception | None = None
    # Set while nothing is being copied.
    _copied: threading.Event = field(default_factory=threading.Event)
    # What the copies run on beside the training; none without a GPU.
    _stream: torch.cuda.Stream | None = None
    _num_saves: int = 0
    # By the stem of a file and name; they stay the same from one save to the next.
    _places: dict[str, dict[str, _Place]] = field(default_factory=dict)
    # Host memory of what this rank holds, which the next save uses again.
    _staged: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Its own, because the threads' transfers must not mix with the training's; on the host, as what they send is.
        self._group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=self.limit_s), group_desc=BACKGROUND
        )
        self._copied.set()
        if self.device.type == "cuda":  # a run on the CPU leaves a GPU alone that is there too
            self._stream = torch.cuda.Stream()

    def save(
        self,
        folder: Path,
        states: Sequence[TrainState],
        extra: Mapping[str, Any],
        texts: Mapping[str, str],
        keep: int,
    ) -> None:
        """Starts to write `folder`, and removes all but the newest `keep` that the same run wrote once it is whole.

        A save that is still under way is waited for first. Parameters, moments and averages must stay as they are until
        `wait_for_copy` has returned.

        Args:
            states: of the run's models, one or two.
            extra: JSON values stored beside the step (configuration, data position, the run's id under "run").
            texts: further files by name.

        Communication: one object broadcast where a save was under way; in the thread, shards to the owners.

        Raises:
            OSError: on all ranks, where the save before could not be written.
        """
        # One save at a time, because staged memory and the group belong to the one under way.
        self.wait()
        models = {stems_of(number): state.model for number, state in enumerate(states)}
        tensors = dict[str, dict[str, Tensor]]()
        for number, state in enumerate(states):
            tensors |= _tensors_of(state, stems_of(number))
        # Moments come with the first step. From then on places and staged memory stay.
        if _names(tensors) != _names(self._places):
            self._places = {stem: _find_places(entries) for stem, entries in tensors.items()}
            self._staged = {stem: {} for stem in tensors}
        files = {STATE: json.dumps({"step": states[0].step, **extra}, indent=2) + "\n", **texts}
        for stems, model in models.items():
            # Folders of weights are such as `from_pretrained` of diffusers reads.
            for name in (stems.model, stems.averaged):
                stem = f"{name}/{WEIGHTS_STEM}"
                if stem not in tensors:
                    continue
                files[f"{name}/{CONFIG}"] = _config_of(model)
                if len(_file_names(stem, self._places[stem])) > 1:
                    files[f"{stem}.safetensors.index.json"] = _index(stem, tensors[stem], self._places[stem])
        self._num_saves += 1
        self._copied.clear()
        if self._stream is not None:
            # What this step still computes is copied once it is there.
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(
            target=self._run,
            # Averages that were made for this save are held until they are copied, and not until they are written.
            args=(folder, files, [tensors], extra.get("run"), keep),
            name=SAVING,
            daemon=True,
        )
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether this rank knows already that the save under way cannot end well; rank 0 knows of all ranks."""
        return self._error is not None

    def wait_for_copy(self) -> None:
        """Waits until what is being saved may change again: before an optimizer steps, or weights are exchanged."""
        self._copied.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Waits until what was saved lies whole on disk.

        Communication: one object broadcast.

        Raises:
            OSError: on all ranks, where it could not be written; what was saved before is left as it was.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None

        def outcome() -> None:
            if error is not None:
                raise error

        from_first_rank(outcome)

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies to host memory what this rank sends or writes of tensors."""
        rank = dist.get_rank()
        held = [
            (tensors[stem][name], self._staged[stem], name)
            for stem, places in self._places.items()
            for name, place in places.items()
            if rank in place.holders
        ]
        sources, copies = list[Tensor](), list[Tensor]()
        try:
            with torch.cuda.stream(self._stream):  # nothing, where there is none
                for tensor, staged, name in held:
                    quantized = is_quantized(tensor)
                    local = experiment("low_bit").saved_values(tensor) if quantized else _own_part(tensor)
                    if name not in staged:
                        # Page-locked memory is dear to get, and its shapes do not change: the next save uses it again.
                        # torch's own would be rounded up to a power of two. A run on the CPU locks none.
                        staged[name] = (
                            allocate_on_host(local.nbytes).view(local.dtype).view(local.shape)
                            if local.is_cuda
                            else torch.empty_like(local, memory_format=torch.contiguous_format)
                        )
                    if quantized:
                        # Its values were made for this, and are gone before the next ones are made.
                        staged[name].copy_(local, non_blocking=True)
                    else:
                        sources.append(local)
                        copies.append(staged[name])
                # One call, which leaves Python to the training while it copies. A rank may own nothing.
                if copies:
                    torch._foreach_copy_(copies, sources, non_blocking=True)
        finally:
            # Also after an error, for which no step may wait.
            self._copied.set()
        if self._stream is not None:
            self._stream.synchronize()

    def _run(
        self,
        folder: Path,
        files: Mapping[str, str],
        tensors: list[Mapping[str, Mapping[str, Tensor]]],
        run: Any,
        keep: int,
    ) -> None:
        """What the thread does with the tensors, which it takes, and the other files."""
        if self._stream is not None:
            # A thread begins on the first GPU, where what it allocates would take a context of every rank.
            torch.cuda.set_device(self._stream.device)
        # The group's name tells this saver's keys from those of another run in the same job.
        begun, key = (
            folder.with_name(folder.name + PARTIAL),
            f"save/{self._group.group_name}/{self._num_saves}",
        )
        try:
            _publish(f"{key}/copied/{dist.get_rank()}", lambda: self._stage(tensors.pop()))
            if dist.get_rank() == 0:
                _publish(f"{key}/begin", lambda: self._begin(begun, key))
            self._hear(f"{key}/begin", 0)
            _publish(f"{key}/{dist.get_rank()}", lambda: self._write_tensors(begun))
            if dist.get_rank() == 0:
                self._finish(folder, begun, files, key)
                remove_old(folder, run, keep)
        except Exception as error:  # noqa: BLE001 - it is raised where the main thread waits
            self._error = OSError(
                f"the saved state {folder} could not be saved ({error}); make room for it or make its place writable, "
                "and go on from the newest whole one with --resume"
            )

    def _hear(self, key: str, rank: int) -> dict[str, str]:
        """What a rank has published under this key.

        Raises:
            OSError: it failed, or it was not heard of for too long.
        """
        deadline = time.monotonic() + self.limit_s
        while not _store().check([key]):  # to wait in the store would keep the training from asking it
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} did not write its files within {self.limit_s:g} s")
            time.sleep(_POLL_S)
        outcome = json.loads(_store().get(key))
        if "error" in outcome:
            raise OSError(f"rank {rank}: {outcome['error']}")
        sums: dict[str, str] = outcome["sums"]
        return sums

    @torch.no_grad()
    def _write_tensors(self, begun: Path) -> dict[str, str]:
        """Sends this rank's shards, receives and writes the tensors that it owns; the sum of each file."""
        rank = dist.get_rank()
        # Messages between two ranks match by their order, which on both sides is that of `_places`.
        sent: list[Any] = [
            dist.isend(self._staged[stem][name], place.owner, group=self._group)
            for stem, places in self._places.items()
            for name, place in places.items()
            if rank in place.holders and rank != place.owner and self._staged[stem][name].numel()
        ]
        sums: dict[str, str] = {}
        error: Exception | None = None
        for stem, places in self._places.items():
            # Only one file's tensors at a time are whole in host memory.
            tensors = self._receive(stem)
            file = _file_names(stem, places).get(rank)
            # After an error nothing is written, but what the others send is still taken.
            if file is not None and error is None:
                try:
                    path = begun / file
                    sums[file] = retried(partial(_write_file, path, tensors), f"writing {path}")
                except (OSError, SafetensorError) as failure:
                    error = failure
        # Sends read the staged memory, which the next save writes over.
        for work in sent:
            work.wait()
        if error is not None:
            raise error
        return sums

    def _receive(self, stem: str) -> dict[str, Tensor]:
        """The tensors that this rank owns, whole. Communication: their shards, from those that hold them."""
        rank, whole, coming = dist.get_rank(), dict[str, Tensor](), list[Any]()
        for name, place in self._places[stem].items():
            if place.owner != rank:
                continue
            own = self._staged[stem][name]
            # Nobody else has a part of it, so it is written as it was staged.
            if len(place.holders) == 1:
                whole[name] = own
                continue
            whole[name] = own.new_empty(place.shape)
            for holder in sorted(place.holders):
                part = whole[name][place.region(holder)]
                if holder == rank:
                    part.copy_(own)
                elif part.numel():
                    # Rows lie in one piece and are received where they belong, columns beside it.
                    buffer = part if part.is_contiguous() else torch.empty_like(part)
                    coming.append((dist.irecv(buffer, holder, group=self._group), part, buffer))
        for work, part, buffer in coming:
            work.wait()
            if buffer is not part:
                part.copy_(buffer)
        return whole

    def _begin(self, begun: Path, key: str) -> None:
        """Makes the folder once all ranks have copied."""
        for rank in range(dist.get_world_size()):
            self._hear(f"{key}/copied/{rank}", rank)
        remove_partial(begun.parent)
        begun.mkdir(parents=True)

    def _finish(self, folder: Path, begun: Path, files: Mapping[str, str], key: str) -> None:
        """Writes the texts and the manifest once all ranks have written, and gives the folder its name."""
        sums, errors = dict[str, str](), list[str]()
        try:
            # All of them, also after an error: they may still be writing.
            for rank in range(dist.get_world_size()):
                try:
                    sums |= self._hear(f"{key}/{rank}", rank)
                except OSError as error:
                    errors.append(str(error))
            if errors:
                raise OSError("; ".join(errors))
            for name, text in files.items():
                (begun / name).parent.mkdir(exist_ok=True)
                (begun / name).write_text(text, encoding="utf-8")
                sums[name] = sha256_of(begun / name)
            manifest = json.dumps(dict(sorted(sums.items())), indent=2) + "\n"
            (begun / MANIFEST).write_text(manifest, encoding="utf-8")
            _flush(begun / MANIFEST)
            # Only what is whole gets the name; what had it before is kept under another one.
            set_aside(folder)
            begun.rename(folder)
        finally:
            remove_partial(folder.parent)  # what a full disk has left; nothing, where all went well


def record_of_model(state: TrainState, norms: Sequence[float]) -> dict[str, Any]:
    """The values of a `ModelRecord`; `norms` are those of its latest gradients."""
    return {
        "model_class": class_name(state.model),
        "ema_updates": state.ema.num_updates if state.ema is not None else 0,
        "norms": list(norms),
        "optimizer": numbers_of(state.optimizer),
    }


def class_name(model: nn.Module) -> str:
    """Without the class that FSDP makes."""
    return type(model).__name__.removeprefix("FSDP")


def _tensors_of(state: TrainState, stems: Stems) -> dict[str, dict[str, Tensor]]:
    """Everything that is saved of a model, by the stem of its files and by name."""
    weights = saved_weights(state.model)
    # Unlike parameters, they may change in the forward that runs beside the copy.
    weights |= {name: buffer.clone() for name, buffer in state.model.named_buffers() if name in weights}
    moments = {
        f"{name}.{entry}": state.optimizer.state[parameter][entry]
        for name, parameter in state.model.named_parameters()
        for entry in ENTRIES
        if entry in state.optimizer.state.get(parameter, {})
    }
    tensors = {f"{stems.model}/{WEIGHTS_STEM}": weights, stems.optimizer: moments}
    if state.ema is not None:
        # Weights that are not averaged are saved beside those that are: the folder is a whole model.
        tensors[f"{stems.averaged}/{WEIGHTS_STEM}"] = {**weights, **state.ema.weights}
    return tensors


def _names(by_stem: Mapping[str, Mapping[str, object]]) -> dict[str, list[str]]:
    return {stem: list(entries) for stem, entries in by_stem.items()}


def _find_places(tensors: Mapping[str, Tensor]) -> dict[str, _Place]:
    """Where each tensor goes: to the rank with the fewest bytes so far, of those that can have it whole."""
    loads: dict[frozenset[int], list[tuple[int, int]]] = {}
    copies: dict[Any, dict[int, frozenset[int]]] = {}
    everyone = {rank: frozenset([rank]) for rank in range(dist.get_world_size())}
    places = {}
    for name, tensor in tensors.items():
        mesh, placements = None, tuple[Placement, ...]()
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            if (mesh, placements) not in copies:
                copies[mesh, placements] = _copies(mesh, placements)
        by_owner = everyone if mesh is None else copies[mesh, placements]
        # A heap for each set of ranks, so that the next owner of a thousand ranks is found at once.
        load = loads.setdefault(frozenset(by_owner), [(0, rank) for rank in sorted(by_owner)])
        size_bytes, owner = load[0]
        heapq.heapreplace(load, (size_bytes + tensor.numel() * tensor.element_size(), owner))
        places[name] = _Place(owner, by_owner[owner], tensor.shape, mesh, placements)
    return places


def _copies(mesh: DeviceMesh, placements: Sequence[Placement]) -> dict[int, frozenset[int]]:
    """For each rank of a mesh, those that hold a whole tensor between them with it.

    Of a mesh of 2 copies x 2 shards, ranks 0, 1 | 2, 3, these are 0, 1 for ranks 0 and 1, and 2, 3 for 2 and 3.
    """
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    replicated = [dim for dim in range(mesh.ndim) if dim not in sharded]
    shards = math.prod(mesh.size(dim) for dim in sharded)
    # [copies, shards]: a row holds ranks that differ along the sharded axes alone.
    rows = mesh.mesh.permute(*replicated, *sharded).reshape(-1, shards).tolist()
    return {rank: frozenset(row if sharded else [rank]) for row in rows for rank in row}


def _file_names(stem: str, places: Mapping[str, _Place]) -> dict[int, str]:
    """The file of each rank that owns any."""
    # Where there are no tensors, rank 0 writes an empty file, so that every state has the same files.
    ranks = sorted({place.owner for place in places.values()}) or [0]
    if len(ranks) == 1:
        return {ranks[0]: f"{stem}.safetensors"}
    return {
        rank: f"{stem}-{number:05d}-of-{len(ranks):05d}.safetensors"
        for number, rank in enumerate(ranks, start=1)
    }


def _config_of(model: nn.Module) -> str:
    """What `from_pretrained` of diffusers reads, without FSDP's class and paths of this machine.

    Of an author's class the arguments of its configuration.
    """
    values = dict(arguments_of(model))
    if isinstance(model.config, Mapping):
        values = json.loads(model.to_json_string())  # type: ignore[operator]
        values.pop("_name_or_path", None)
    values["_class_name"] = class_name(model)
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _index(stem: str, tensors: Mapping[str, Tensor], places: Mapping[str, _Place]) -> str:
    """Which file each tensor lies in, as diffusers reads it."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    names = _file_names(stem, places)
    files = {name: Path(names[place.owner]).name for name, place in places.items()}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _publish(key: str, work: Callable[[], dict[str, str] | None]) -> None:
    """Does the work and publishes what came of it: the sums of the files that it wrote, or its error."""
    try:
        outcome: dict[str, Any] = {"sums": work() or {}}
    except Exception as error:  # noqa: BLE001 - they must hear of it, whatever it is
        outcome = {"error": str(error)}
    _store().set(key, json.dumps(outcome))


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors to a file; its sum."""
    path.parent.mkdir(exist_ok=True)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    _flush(path)
    return sha256_of(path)


def _flush(path: Path) -> None:
    """Until then a file lies in memory, and a machine that loses power loses it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
