"""Writes saved states beside the training.

Each tensor gets an owner, the rank that has the fewest bytes to write so far, and the ranks of one copy exchange their
shards so that every owner holds its tensors whole. That is one all-to-all for each tensor that the busiest rank owns.
Then the step goes on. Threads write the files, and rank 0's waits for the others through torch's store, not through a
collective, which training could not run beside. It writes the manifest last and gives the folder its name.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from opensora_accel.training.adapters import saved_weights
from opensora_accel.training.lowbit import saved_values
from opensora_accel.training.optim import EMA
from opensora_accel.training.ranks import from_first_rank
from opensora_accel.training.saved_state.folder import (
    AVERAGED,
    CONFIG,
    MANIFEST,
    MODEL,
    OPTIMIZER_STEM,
    PARTIAL,
    STATE,
    WEIGHTS_STEM,
    remove_old,
    remove_partial,
    set_aside,
    sha256_of,
)

_ADAM_ENTRIES = ("exp_avg", "exp_avg_sq", "step")
_POLL_S = 0.05
_ROUND_BYTES = 2**26


@dataclass
class TrainState:
    """What a run is, beyond its configuration."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    step: int = 0


@dataclass
class Saver:
    """Saves one state at a time. Every rank calls every method, in the same order."""

    # How long rank 0 waits for the other ranks' files: a rank that died writes none.
    limit_s: float = 1800.0
    _thread: threading.Thread | None = None
    # What became of the save, on rank 0: the error, if there was one.
    _error: Exception | None = None
    _num_saves: int = 0
    # Host memory of this rank's tensors, by file and name; the next save uses it again where it is page-locked.
    _staged: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def save(
        self, folder: Path, state: TrainState, extra: Mapping[str, Any], texts: Mapping[str, str], keep: int
    ) -> None:
        """Starts to write `folder`, and removes all but the newest `keep` that the same run wrote once it is whole.

        A save that is still under way is waited for first.

        Args:
            extra: JSON values stored beside the step (configuration, data position, the run's id under "run").
            texts: further files by name.

        Communication: all-to-alls of the shards, and two object broadcasts.

        Raises:
            OSError: on all ranks, where the folder cannot be made, or the save before could not be written.
        """
        self.wait()
        tensors = _tensors_of(state)
        owners = {stem: _owners(entries) for stem, entries in tensors.items()}
        names = {stem: _file_names(stem, by_name.values()) for stem, by_name in owners.items()}
        self._stage(tensors, owners, names)
        record = {
            "step": state.step,
            "model_class": class_name(state.model),
            "ema_updates": state.ema.num_updates if state.ema is not None else 0,
            **extra,
        }
        files = {STATE: json.dumps(record, indent=2) + "\n", **texts}
        for stem, by_name in owners.items():
            model = stem.partition("/")[0]
            if model != OPTIMIZER_STEM:
                files[f"{model}/{CONFIG}"] = _config_of(state.model)
                if len(names[stem]) > 1:
                    files[f"{stem}.safetensors.index.json"] = _index(tensors[stem], by_name, names[stem])
        writers = sorted({rank for by_owner in names.values() for rank in by_owner} | {0})
        partial = folder.with_name(folder.name + PARTIAL)
        from_first_rank(lambda: _with_remedy(folder, lambda: _make_partial(partial)))
        self._num_saves += 1

        self._thread = threading.Thread(
            target=self._write,
            args=(folder, files, writers, extra.get("run"), keep),
            name="saved state",
            daemon=True,
        )
        self._thread.start()

    def _write(
        self, folder: Path, files: Mapping[str, str], writers: Sequence[int], run: Any, keep: int
    ) -> None:
        """What a thread does: this rank's files, and on rank 0 the rest once all ranks have told of theirs."""
        partial, key = folder.with_name(folder.name + PARTIAL), f"save/{self._num_saves}"
        told: dict[str, Any] = {}
        try:
            told["sums"] = _write_tensors(partial, self._staged)
        except Exception as error:  # noqa: BLE001 - rank 0 must hear of it, whatever it is
            told["error"] = str(error)
        _store().set(f"{key}/{dist.get_rank()}", json.dumps(told))
        if dist.get_rank() != 0:
            return
        try:
            _with_remedy(folder, lambda: self._finish(folder, partial, files, key, writers))
            remove_old(folder, run, keep)
        except Exception as error:  # noqa: BLE001 - it is raised where the main thread waits
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether rank 0 knows already that the save under way cannot end well."""
        return self._error is not None

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
        if not torch.cuda.is_available():
            self._staged = {}  # only page-locked memory is worth keeping

        def outcome() -> None:
            error, self._error = self._error, None
            if error is not None:
                raise error

        from_first_rank(outcome)

    @torch.no_grad()
    def _stage(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        owners: Mapping[str, Mapping[str, int]],
        names: Mapping[str, Mapping[int, str]],
    ) -> None:
        """Copies what this rank owns to host memory, by file and name."""
        rank, before, self._staged = dist.get_rank(), self._staged, {}
        for stem, entries in tensors.items():
            if rank in names[stem]:
                self._staged[names[stem][rank]] = {}
            for name, whole in _exchange(entries, owners[stem]):
                file = names[stem][rank]
                if whole.is_cuda:
                    buffer = before.get(file, {}).get(name)
                    if buffer is None or buffer.shape != whole.shape or buffer.dtype != whole.dtype:
                        buffer = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
                    whole = buffer.copy_(whole, non_blocking=True)
                self._staged[file][name] = whole
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _finish(
        self, folder: Path, partial: Path, files: Mapping[str, str], key: str, writers: Sequence[int]
    ) -> None:
        """Writes the texts and the manifest once all ranks have written, and gives the folder its name."""
        try:
            sums = self._collect(key, writers)
            for name, text in files.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_text(text, encoding="utf-8")
                sums[name] = sha256_of(partial / name)
            manifest = json.dumps(dict(sorted(sums.items())), indent=2) + "\n"
            (partial / MANIFEST).write_text(manifest, encoding="utf-8")
            _flush(partial / MANIFEST)
            # Only what is whole gets the name; what had it before is kept under another one.
            set_aside(folder)
            partial.rename(folder)
        finally:
            remove_partial(folder.parent)  # what a full disk has left; nothing, where all went well

    def _collect(self, key: str, writers: Sequence[int]) -> dict[str, str]:
        """The sums of all ranks' files, by name."""
        deadline, sums, errors = time.monotonic() + self.limit_s, dict[str, str](), list[str]()
        for rank in writers:  # all of them, also after an error: they may still be writing
            while not _store().check([f"{key}/{rank}"]):
                if time.monotonic() > deadline:
                    raise OSError(f"rank {rank} did not write its files within {self.limit_s:g} s")
                time.sleep(_POLL_S)
            told = json.loads(_store().get(f"{key}/{rank}"))
            sums |= told.get("sums", {})
            errors += [f"rank {rank}: {told['error']}"] if "error" in told else []
        if errors:
            raise OSError("; ".join(errors))
        return sums


def class_name(model: nn.Module) -> str:
    """Without the class that FSDP makes."""
    return type(model).__name__.removeprefix("FSDP")


def _tensors_of(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Everything that is saved, by the stem of its files and by name."""
    weights = saved_weights(state.model)
    moments = {
        f"{name}.{entry}": saved_values(state.optimizer.state[parameter][entry])
        for name, parameter in state.model.named_parameters()
        for entry in _ADAM_ENTRIES
        if entry in state.optimizer.state.get(parameter, {})
    }
    found = {f"{MODEL}/{WEIGHTS_STEM}": weights, OPTIMIZER_STEM: moments}
    if state.ema is not None:
        found[f"{AVERAGED}/{WEIGHTS_STEM}"] = {**weights, **state.ema.weights}
    return found


def _owners(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank that writes each tensor: the one with the fewest bytes so far, of those that can have it whole."""
    sizes_bytes: dict[int, int] = dict.fromkeys(range(dist.get_world_size()), 0)
    owners = {}
    holders: dict[Any, list[int]] = {}  # by mesh: to read the ranks of one takes as long as a small save
    for name, tensor in tensors.items():
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        if mesh not in holders:
            holders[mesh] = list(sizes_bytes) if mesh is None else mesh.mesh.flatten().tolist()
        ranks = holders[mesh]
        owner = min(ranks, key=lambda rank: (sizes_bytes[rank], rank))
        sizes_bytes[owner] += tensor.numel() * tensor.element_size()
        owners[name] = owner
    return owners


def _file_names(stem: str, owners: Any) -> dict[int, str]:
    """The file of each rank that owns any."""
    ranks = sorted(set(owners)) or [0]
    if len(ranks) == 1:
        return {ranks[0]: f"{stem}.safetensors"}
    return {
        rank: f"{stem}-{number:05d}-of-{len(ranks):05d}.safetensors"
        for number, rank in enumerate(ranks, start=1)
    }


def _exchange(tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors [...] that this rank owns, whole, in memory of their own.

    Communication: all-to-alls of shards between the ranks of a copy, in rounds of 64 MiB a rank.
    """
    rank = dist.get_rank()
    sharded: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if owners[name] == rank:
                yield name, tensor.detach().clone()
        elif tensor.placements[-1] != Shard(0) or any(not p.is_replicate() for p in tensor.placements[:-1]):
            whole = tensor.full_tensor()  # all ranks of its mesh take part
            if owners[name] == rank:
                yield name, whole
        else:
            group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
            sharded.setdefault((group, tensor.dtype), {})[name] = tensor
    for (group, _dtype), entries in sharded.items():
        members = dist.get_process_group_ranks(group)
        by_owner = [[name for name in entries if owners[name] == member] for member in members]
        for names in _rounds(by_owner, entries):
            yield from _exchange_round(names, entries, group)


def _rounds(by_owner: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]) -> Iterator[list[list[str]]]:
    """For each rank of a copy the next tensors that it gets, of few enough bytes to hold them twice."""
    left = [list(names) for names in by_owner]
    while any(left):
        names: list[list[str]] = [[] for _ in left]
        for taken, rest in zip(names, left, strict=True):
            size_bytes = 0
            while rest and (not taken or size_bytes < _ROUND_BYTES):
                taken.append(rest.pop(0))
                size_bytes += tensors[taken[-1]].numel() * tensors[taken[-1]].element_size()
        yield names


def _exchange_round(
    names: Sequence[Sequence[str]], tensors: Mapping[str, DTensor], group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """The tensors [...] that are this rank's in this round. Communication: one all-to-all of shards."""
    own = names[group.rank()]
    given = torch.cat([tensors[name].to_local().flatten() for of_rank in names for name in of_rank])
    sent_sizes = [sum(tensors[name].to_local().numel() for name in of_rank) for of_rank in names]
    # Elements of each of our tensors, by the rank that holds them.
    shares = [_shard_sizes(tensors[name], group.size()) for name in own]
    received_sizes = [sum(share[rank] for share in shares) for rank in range(group.size())]
    received = given.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, given, received_sizes, sent_sizes, group=group)
    from_rank = [
        part.split([share[rank] for share in shares])
        for rank, part in enumerate(received.split(received_sizes))
    ]
    for number, name in enumerate(own):
        # Shards are runs of rows: one after another they are the whole tensor.
        yield name, torch.cat([parts[number] for parts in from_rank]).view(tensors[name].shape)


def _shard_sizes(tensor: DTensor, num_ranks: int) -> list[int]:
    """Elements of each rank's shard, as torch.chunk cuts rows: 10 rows on 4 ranks are 3, 3, 3 and 1."""
    num_rows = tensor.size(0)
    most = -(-num_rows // num_ranks)
    rows = [max(0, min(most, num_rows - most * rank)) for rank in range(num_ranks)]
    return [count * (tensor.numel() // num_rows if num_rows else 0) for count in rows]


def _config_of(model: nn.Module) -> str:
    """What `from_pretrained` of diffusers reads, without FSDP's class and paths of this machine."""
    values = json.loads(model.to_json_string())  # type: ignore[operator]
    values.pop("_name_or_path", None)
    values["_class_name"] = class_name(model)
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _index(tensors: Mapping[str, Tensor], owners: Mapping[str, int], names: Mapping[int, str]) -> str:
    """Which file each tensor lies in, as diffusers reads it."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    files = {name: Path(names[owner]).name for name, owner in owners.items()}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _with_remedy(folder: Path, run: Any) -> None:
    """Runs it; an error says what can be done."""
    try:
        run()
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the saved state {folder} could not be saved ({error}); make room for it or make its place writable, "
            "and go on from the newest whole one with --resume"
        ) from error


def _make_partial(partial: Path) -> None:
    remove_partial(partial.parent)
    partial.mkdir(parents=True)


def _write_tensors(partial: Path, staged: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Writes this rank's files; the sum of each."""
    sums = {}
    for name, entries in staged.items():
        (partial / name).parent.mkdir(exist_ok=True)
        save_file(dict(entries), partial / name, metadata={"format": "pt"})
        _flush(partial / name)
        sums[name] = sha256_of(partial / name)
    return sums


def _flush(path: Path) -> None:
    """Until then a file lies in memory, and a machine that loses power loses it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
