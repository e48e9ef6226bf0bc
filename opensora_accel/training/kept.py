"""What the frozen encoders gave, kept: in memory for this run, in a folder for every run, or in both.

    codec.cache, text.cache    each clip, or all captions, in memory; the encoder is released once all are there
    cache_folder               each clip and caption on disk (`disk_cache.py`); an encoder is loaded for what is missing

With a folder nothing is loaded for a run whose clips and captions are all in it; sampling, at the end, loads the VAE to
decode. That the models could be loaded is checked at the start all the same, by their outlines.

Every rank reads for itself, and computes for itself what is not there: as without a folder, ranks that share a sample
all encode it. So a rank that finds a file that another rank could not read does what the other does, in its own time,
and no collective depends on what was found. Ranks that compute the same at the same time each write it; one file stays.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import av
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.files import sha256_of
from opensora_accel.training import conditions, encoders, pretrained, shards, video
from opensora_accel.training.conditions import Given
from opensora_accel.training.config import TextConfig, TrainConfig
from opensora_accel.training.data import Clip
from opensora_accel.training.disk_cache import DiskCache, code_version
from opensora_accel.training.encoders import TEXT_STEM, VAE_STEM, Codec, TextEncoder
from opensora_accel.training.ranks import from_all_ranks, from_first_of_machine, from_first_rank
from opensora_accel.weights import find_stored

T = TypeVar("T")


def open_disk_cache(folder: str) -> DiskCache:
    """The folder of a run, which rank 0 makes.

    Communication: one object broadcast.

    Raises:
        ValueError: on all ranks, where the path can be no folder. One that cannot be written to is told when something
            is to be stored.
    """

    def make() -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except PermissionError:
            return
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise ValueError(
                    f"cache_folder {folder!r} cannot be a folder ({pretrained.in_one_line(error)}); name another"
                ) from error

    from_first_rank(make)
    return DiskCache(folder)


class OnDemand(Generic[T]):
    """A model that is loaded when it is first asked for, and again after it was released."""

    def __init__(self, build: Callable[[], T], loaded: T | None = None):
        self._build, self._loaded = build, loaded

    def get(self) -> T:
        if self._loaded is None:
            self._loaded = self._build()
        return self._loaded

    def release(self) -> None:
        if self._loaded is not None:
            self._loaded = None
            free_unused()


def free_unused() -> None:
    """Gives back the memory of models that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Latents


class CachedLatents:
    """A codec that encodes each clip once, and keeps its latents on the host, in a folder, or in both.

    It lets go of the VAE as soon as all clips of the run are there. A clip that was not foreseen, because another file
    turned out bad, and clips that are decoded at the end load the VAE again, for as long as it takes.
    """

    def __init__(
        self,
        codec: Codec,
        build: Callable[[], Codec],
        needed: Iterable[tuple[Clip, Given | None]],
        *,
        in_memory: bool = True,
        stored: Stored | None = None,
    ):
        """`codec` and what `build` gives are the same; `needed` are the clips that this rank will ask for, whole (None)
        or with what is given of them.

        Args:
            stored: the folder, with what its keys have beside the clip. `codec` may then be an outline.
        """
        assert in_memory or stored is not None
        self.channels, self.spatial, self.temporal = codec.channels, codec.spatial, codec.temporal
        if stored is None:
            self._codec = OnDemand(build, codec)
        else:
            self._codec = OnDemand(lambda: stored.files.unchanged(build))
        self._needed, self._in_memory, self._stored = set(needed), in_memory, stored
        self._latents: dict[tuple[Clip, Given | None], Tensor] = {}

    def encode(
        self, frames: Tensor, clips: Sequence[Clip] = (), given: Sequence[Given | None] | None = None
    ) -> Tensor:
        """frames: uint8 [B, T, H, W, 3] of these B clips, and what is given of each → latents [B, C, t, h, w]."""
        given = given or [None] * len(clips)
        latents = [self._latents_of(*each) for each in zip(clips, frames, given, strict=True)]
        if not self._needed:
            self._codec.release()
        return torch.stack(latents).to(frames.device)

    def _latents_of(self, clip: Clip, frames: Tensor, given: Given | None) -> Tensor:
        """frames: uint8 [T, H, W, 3] → latents [C, t, h, w] on the host."""
        if (clip, given) in self._latents:
            return self._latents[clip, given]

        def encode() -> Tensor:
            shown = None if given is None else given.frames(len(frames)).unsqueeze(0)
            return self._codec.get().encode(frames.unsqueeze(0), shown)[0].cpu()

        if self._stored is not None and clip.digest is not None:
            size = clip.bucket
            key = {
                "video": clip.digest,
                "start": clip.start,
                "num_frames": size.num_frames,
                "height": size.height,
                "width": size.width,
                "given": given,
            }
            latents, is_kept = self._stored.get_or_compute(
                key, f"{clip.file} from frame {clip.start}", encode
            )
        else:
            latents, is_kept = encode(), False
        if self._in_memory:
            self._latents[clip, given] = latents
        if self._in_memory or is_kept:
            self._needed.discard((clip, given))
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, t, h, w] to uint8 [B, T, H, W, 3]."""
        frames = self._codec.get().decode(latents)
        if not self._needed:
            self._codec.release()
        return frames


# Embeddings


class StoredCaptions:
    """A text encoder whose embeddings are kept in a folder, without padding; it is loaded where one is missing.

    The key has the tokens, not the caption and the files of the tokenizer: tokens are all that the encoder is given. So
    a tokenizer that changes some captions costs those, whatever of its files has changed.
    """

    def __init__(
        self, outline: TextEncoder, build: Callable[[], TextEncoder], needed: Iterable[str], stored: Stored
    ):
        """`needed` are the captions that will be asked for; once all are stored, the encoder is released."""
        self.tokenizer, self.tokens, self.length = outline.tokenizer, outline.tokens, outline.length
        self.width, self.dtype = outline.width, outline.dtype
        self._encoder = OnDemand(lambda: stored.files.unchanged(build))
        self._needed, self._stored = set(needed), stored

    def encode(self, captions: Sequence[str], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption."""
        states = torch.zeros(len(captions), self.length, self.width, dtype=dtype)
        for padded, caption in zip(states, captions, strict=True):
            rows = self._rows(caption, device)
            padded[: len(rows)] = rows
        if not self._needed:
            self._encoder.release()
        return states.to(device)

    def _rows(self, caption: str, device: torch.device) -> Tensor:
        """[tokens of the caption, width] on the host, in the encoder's type."""
        ids, mask = self.tokens(caption)
        count = int(mask.sum())

        def encode() -> Tensor:
            return self._encoder.get().encode([caption], device, self.dtype)[0, :count].cpu()

        given = hashlib.sha256(torch.cat([ids, mask]).numpy().tobytes()).hexdigest()
        rows, is_kept = self._stored.get_or_compute({"tokens": given}, caption, encode)
        if is_kept:
            self._needed.discard(caption)
        return rows


class EmbeddedCaptions:
    """What `TextEncoder.encode` gives for captions that are known beforehand, without the encoder.

    The embeddings lie, without padding, in one file for all ranks of a machine. Each maps it, so that they are there
    once, and the system may write them out where memory is short. The file has lost its name as soon as all have opened
    it: whatever happens to the run, nothing is left of it. Of P = 3 ranks of a machine rank 0 embeds captions 0, 3, …,
    rank 1 captions 1, 4, …, rank 2 captions 2, 5, ….
    """

    def __init__(self, encoder: TextEncoder | StoredCaptions, captions: Iterable[str], device: torch.device):
        """Embeds the captions; every rank calls it, with the same ones.

        Communication: four object all-gathers.

        Raises:
            OSError: on all ranks, where TMPDIR has no room on one of their machines.
        """
        self.length, self.width = encoder.length, encoder.width
        ordered, dtype = sorted(set(captions)), encoder.dtype
        tokens = encoder.tokenizer(ordered, truncation=True, max_length=self.length)["input_ids"]
        self._counts = dict(zip(ordered, map(len, tokens), strict=True))
        ends = list(accumulate(self._counts.values()))
        self._ends = dict(zip(ordered, ends, strict=True))
        shared, place, num_places = _shared_on_machine(ends[-1] * self.width, dtype)
        # One row for each token of each caption.
        self._rows = shared.view(-1, self.width)
        for caption in ordered[place::num_places]:
            states = encoder.encode([caption], device, dtype)[0]
            self._rows_of(caption).copy_(states[: self._counts[caption]])
        from_all_ranks(None)  # until then another rank's rows are not there

    def encode(self, captions: Sequence[str], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption."""
        states = torch.zeros(len(captions), self.length, self.width, dtype=dtype)
        for padded, caption in zip(states, captions, strict=True):
            padded[: self._counts[caption]] = self._rows_of(caption)
        return states.to(device)

    def _rows_of(self, caption: str) -> Tensor:
        end = self._ends[caption]
        return self._rows[end - self._counts[caption] : end]


def _shared_on_machine(num_elements: int, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """Memory [num_elements] that all ranks of this machine share, this rank's number among them, and how many they are.

    Raises:
        OSError: on all ranks, where one cannot have it.
    """
    host, size_bytes = socket.gethostname(), num_elements * dtype.itemsize
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = [rank for rank, other in enumerate(from_all_ranks(host)) if other == host]
    path, shared, error = "", torch.empty(0), None
    try:
        if own_rank == ranks[0]:
            descriptor, path = tempfile.mkstemp(prefix="opensora-accel-captions-")
            with open(descriptor, "r+b") as file:
                # Room is taken here: a full disk would end the process while it writes to the mapped file.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                else:
                    file.truncate(size_bytes)
    except OSError as problem:
        error = f"{type(problem).__name__}: {problem}"
    of_machine = from_all_ranks(path)[ranks[0]]
    if error is None and Path(of_machine).is_file() and Path(of_machine).stat().st_size == size_bytes:
        shared = torch.from_file(of_machine, shared=True, size=num_elements, dtype=dtype)
    elif error is None:
        error = f"rank {ranks[0]}, which has the same host name, has no file {of_machine!r} that is seen here"
    errors = [each for each in from_all_ranks(error) if each is not None]
    if path:
        os.unlink(path)
    if errors:
        raise OSError(
            f"the embeddings of all captions ({size_bytes / 2**30:.2f} GiB) cannot lie in {tempfile.gettempdir()} "
            f"({errors[0]}); let TMPDIR name a place with room on each machine, or hold the text encoder by "
            "--text.cache False"
        )
    return shared, ranks.index(own_rank), len(ranks)


# The folder, and its keys


class Stored:
    """A folder, and what the keys of all values of one encoder have in common.

    Communication, when one is made: two object all-gathers.

    Raises:
        ValueError, OSError: on all ranks, where the encoder's files cannot be read on one of their machines.
    """

    def __init__(self, cache: DiskCache, files: EncoderFiles, common: Mapping[str, Any]):
        self._cache, self.files, self._common = cache, files, {**common, "encoder": files.key}

    @classmethod
    def latents(cls, cache: DiskCache, config: TrainConfig, device: torch.device) -> Stored:
        """Of the VAE. The common part has all that decides latents, but the video, the first frame and the size."""
        modules = (video, shards, encoders, conditions, pretrained)
        made_with = _made_with(device, modules, ("torch", "diffusers", "av", "pillow", "numpy"))
        made_with["versions"] |= {name: list(number) for name, number in av.library_versions.items()}
        common = {
            "what": "latents",
            "stride": config.data.frame_stride,
            "dtype": config.codec.dtype,
            "made_with": made_with,
        }
        return cls(cache, EncoderFiles.read("codec.path", config.codec.path, VAE_STEM), common)

    @classmethod
    def embeddings(cls, cache: DiskCache, config: TextConfig, device: torch.device) -> Stored:
        """Of the text encoder. The common part has all that decides the embedding of a caption, but its tokens."""
        made_with = _made_with(device, (encoders, pretrained), ("torch", "transformers"))
        common = {"what": "embedding", "length": config.length, "dtype": config.dtype, "made_with": made_with}
        return cls(cache, EncoderFiles.read("text.path", config.path, TEXT_STEM), common)

    def get_or_compute(
        self, key: Mapping[str, Any], about: str, compute: Callable[[], Tensor]
    ) -> tuple[Tensor, bool]:
        """What is stored, or what `compute` gives and is stored; whether it is stored now."""
        key = {**self._common, **key}
        found = self._cache.get(key)
        if found is not None:
            return found, True
        value = compute()
        return value, self._cache.put(key, value, about)


def _made_with(
    device: torch.device, modules: Sequence[ModuleType], packages: Sequence[str]
) -> dict[str, Any]:
    """What computes: other devices, versions and code give other bits."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    versions = {package: version(package) for package in packages}
    return {"device": name, "versions": versions, "code": code_version(modules)}


@dataclass(frozen=True)
class EncoderFiles:
    """The files of a pretrained encoder, as they were when the run began."""

    option: str
    folder: str
    stem: str
    # Its class and configuration, and the SHA-256 sum of each file of weights.
    key: dict[str, Any]
    statuses: list[tuple[int, ...]]

    @classmethod
    def read(cls, option: str, folder: str, stem: str) -> EncoderFiles:
        """Reads all files of the encoder, on the first rank of each machine.

        Communication: two object all-gathers.

        Raises:
            ValueError, OSError: on all ranks, where they cannot be read on one of their machines.
        """

        def read() -> EncoderFiles:
            before = _statuses(folder, stem)
            return cls(option, folder, stem, _key_of(option, folder, stem), before)

        return from_first_of_machine(read)

    def unchanged(self, build: Callable[[], T]) -> T:
        """What `build` makes of these files.

        Raises:
            ValueError: they have changed since the run began.
        """
        built = build()
        # Another name or owner changes the status, too; then the content decides.
        changed = _statuses(self.folder, self.stem) != self.statuses
        if changed and _key_of(self.option, self.folder, self.stem) != self.key:
            raise ValueError(
                f"{self.option} {self.folder} has changed since this run began, and cache_folder would keep what it "
                "computes under the name of what was there before; start the run again"
            )
        return built


def _key_of(option: str, folder: str, stem: str) -> dict[str, Any]:
    description = pretrained.read_description(option, folder, "a pretrained encoder")
    # Those with an underscore tell by whom and from where it was saved, and which class it is.
    config = {name: value for name, value in description.items() if not name.startswith("_")}
    paths = _weight_files(folder, stem)
    with ThreadPoolExecutor(8) as pool:
        sums = dict(zip([path.name for path in paths], pool.map(sha256_of, paths), strict=True))
    return {
        "class": description.get("_class_name", description.get("model_type")),
        "config": config,
        "files": sums,
    }


def _statuses(folder: str, stem: str) -> list[tuple[int, ...]]:
    found = [path.stat() for path in [Path(folder) / "config.json", *_weight_files(folder, stem)]]
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found]


def _weight_files(folder: str, stem: str) -> list[Path]:
    of_tensors = {stored.path for stored in find_stored(Path(folder), stem).values()}
    return sorted({*of_tensors, *Path(folder).glob(f"{stem}.safetensors.index.json")})
