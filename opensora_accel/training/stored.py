"""What the keys of kept values have in common: the encoder by the content of its files, the versions, our own code."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import av
import torch
from torch import Tensor

from opensora_accel.files import sha256_of
from opensora_accel.training import (
    captions,
    codec,
    conditions,
    llava,
    pictures,
    pretrained,
    shards,
    text_encoders,
    video,
)
from opensora_accel.training.captions import InTemplate, TextStates
from opensora_accel.training.codec import VAE_STEM
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.disk_cache import DiskCache, code_version
from opensora_accel.training.pictures import IMAGE_STEM, PictureStates
from opensora_accel.training.ranks import from_first_of_machine, from_first_rank
from opensora_accel.training.sections import ImageConfig, TextConfig
from opensora_accel.training.text_encoders import TEXT_STEM, text_paths
from opensora_accel.weights import find_stored

T = TypeVar("T")


def open_disk_cache(folder: str) -> DiskCache:
    """The folder of a run, which rank 0 makes.

    Communication: one object broadcast.

    Raises:
        ValueError: on all ranks, where the path can be no folder. One that cannot be written to is reported when
            something is to be stored.
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


class Stored:
    """A folder, and what the keys of all values of one encoder have in common.

    Communication, when one is made: two object all-gathers.

    Raises:
        ValueError, OSError: on all ranks, where the encoder's files cannot be read on one of their machines.
    """

    def __init__(
        self, cache: DiskCache, files: EncoderFiles, common: Mapping[str, Any], *others: EncoderFiles
    ):
        """`others` are files of what stands behind the encoder."""
        self._cache, self._files, self._common = cache, [files, *others], {**common, "encoder": files.key}

    def unchanged(self, build: Callable[[], T]) -> T:
        """What `build` makes of the files.

        Raises:
            ValueError: they have changed since the run began.
        """
        for files in self._files:
            build = partial(files.unchanged, build)
        return build()

    @classmethod
    def latents(cls, cache: DiskCache, config: TrainConfig, device: torch.device) -> Stored:
        """For latents. The common part has all that decides them, but the video, the first frame and the size."""
        modules = (video, shards, codec, conditions, pretrained)
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
    def pictures(
        cls,
        cache: DiskCache,
        config: ImageConfig,
        device: torch.device,
        taken: PictureStates | None = None,
    ) -> Stored:
        """For the picture encoder's states. The common part has all that decides them, but the video, the first frame
        and the size."""
        made_with = _made_with(
            device,
            (video, shards, pictures, pretrained),
            ("torch", "transformers", "av", "pillow", "numpy"),
        )
        made_with["versions"] |= {name: list(number) for name, number in av.library_versions.items()}
        common = {
            "what": "picture",
            "dtype": config.dtype,
            "processor": pictures.read_processor(config),
            "layer": (taken or PictureStates()).layer,
            "made_with": made_with,
        }
        return cls(cache, EncoderFiles.read("image.path", config.path, IMAGE_STEM), common)

    @classmethod
    def embeddings(
        cls,
        cache: DiskCache,
        config: TextConfig,
        device: torch.device,
        taken: Sequence[TextStates] = (TextStates(),),
        number: int = 0,
    ) -> Stored:
        """For embeddings of captions. The common part has all that decides them, but the tokens.

        Args:
            taken: which states, of each of the family's encoders.
            number: which of them, 0 or 1.
        """
        states = taken[number]
        packages = ["torch", "transformers", *(["diffusers"] if states.connectors else [])]
        modules = [captions, text_encoders, pretrained]
        if isinstance(states.picture, InTemplate):
            modules.append(llava)
        made_with = _made_with(device, modules, packages)
        common = {"what": "embedding", "length": config.length, "dtype": config.dtype, "made_with": made_with}
        # What it reads is in the tokens.
        common |= {name: getattr(states, name) for name in ("layer", "pooled", "masked", "padding")}
        if states.picture:
            made_with["versions"] |= _made_with(device, (), ("pillow", "numpy"))["versions"]
            common["processor"] = text_encoders.processor_of(config.path, states).to_dict()
            if isinstance(states.picture, InTemplate):
                common["picture"] = dataclasses.asdict(states.picture)
        files = EncoderFiles.read(*text_paths(config, taken)[number], TEXT_STEM)
        if not states.connectors:
            return cls(cache, files, common)
        connectors = EncoderFiles.read("text.path_2", config.path_2, VAE_STEM)
        return cls(cache, files, common | {"connectors": connectors.key}, connectors)

    def get_or_compute(
        self, key: Mapping[str, Any], about: str, compute: Callable[[], Tensor]
    ) -> tuple[Tensor, bool]:
        """What is stored, or what `compute` gives and is stored, of any shape; whether it is stored now."""
        key = {**self._common, **key}
        cached = self._cache.get(key)
        if cached is not None:
            return cached, True
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
    # Those with an underscore say by whom and from where it was saved, and which class it is.
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
    statuses = [path.stat() for path in [Path(folder) / "config.json", *_weight_files(folder, stem)]]
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in statuses]


def _weight_files(folder: str, stem: str) -> list[Path]:
    of_tensors = {stored.path for stored in find_stored(Path(folder), stem).values()}
    return sorted({*of_tensors, *Path(folder).glob(f"{stem}.safetensors.index.json")})
