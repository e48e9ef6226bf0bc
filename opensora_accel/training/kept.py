"""What the frozen encoders gave, kept: in memory for this run, in a folder for every run, or in both.

    codec.cache, image.cache, text.cache    each clip, or all captions, in memory; then the encoder is released
    cache_folder                            each clip and caption on disk (`disk_cache.py`); an encoder is loaded for
                                            what is missing

With a folder nothing is loaded for a run whose clips and captions are all in it; sampling, at the end, loads the VAE to
decode. That the models could be loaded is checked at the start all the same, by their outlines.

Every rank reads for itself, and computes for itself what is not there: as without a folder, ranks that share a sample
all encode it. So a rank that finds a file that another rank could not read does what the other does, in its own time,
and no collective depends on what was found. Ranks that compute the same at the same time each write it; one file stays.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import gather_objects
from opensora_accel.training.captions import TextEncoder
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import Codec
from opensora_accel.training.conditions import Conditioning, Given
from opensora_accel.training.pictures import PictureEncoder
from opensora_accel.training.stored import Stored

T = TypeVar("T")


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


# Latents, and states of pictures


class _KeptByClip(Generic[T]):
    """What an encoder gives for each clip, computed once, and kept on the host, in a folder, or in both.

    It lets go of the encoder as soon as all clips of the run are there. A clip that was not foreseen, because another
    file turned out bad, and clips that are sampled at the end load the encoder again, for as long as it takes.
    """

    def __init__(
        self,
        encoder: T,
        build: Callable[[], T],
        needed: Iterable[tuple[Clip, Given | None]],
        *,
        in_memory: bool,
        stored: Stored | None,
    ):
        """`encoder` and what `build` gives are the same; `needed` are the clips that this rank will ask for, whole
        (None) or with what is given of them.

        Args:
            stored: the folder, with what its keys have beside the clip. `encoder` may then be an outline.
        """
        assert in_memory or stored is not None
        if stored is None:
            self._encoder = OnDemand(build, encoder)
        else:
            self._encoder = OnDemand(lambda: stored.unchanged(build))
        self._needed, self._in_memory, self._stored = set(needed), in_memory, stored
        self._values: dict[tuple[Clip, Given | None], Tensor] = {}

    def value_of(
        self, clip: Clip, given: Given | None, key: Mapping[str, Any], compute: Callable[[T], Tensor]
    ) -> Tensor:
        """What `compute` gives with the encoder, or gave before.

        Args:
            key: what its value depends on beside the video, its first frame, and what `stored` has.
        """
        if (clip, given) in self._values:
            return self._values[clip, given]

        def encode() -> Tensor:
            return compute(self._encoder.get()).cpu()

        if self._stored is not None and clip.digest is not None:
            key = {"video": clip.digest, "start": clip.start, **key}
            value, is_kept = self._stored.get_or_compute(key, f"{clip.file} from frame {clip.start}", encode)
        else:
            value, is_kept = encode(), False
        if self._in_memory:
            self._values[clip, given] = value
        if self._in_memory or is_kept:
            self._needed.discard((clip, given))
        return value

    def encoder(self) -> T:
        return self._encoder.get()

    def release_unneeded(self) -> None:
        if not self._needed:
            self._encoder.release()


class KeptPictures:
    """A picture encoder whose states of clips' first frames are kept, as `CachedLatents` keeps latents."""

    def __init__(
        self,
        encoder: PictureEncoder,
        build: Callable[[], PictureEncoder],
        needed: Iterable[Clip],
        *,
        in_memory: bool = True,
        stored: Stored | None = None,
    ):
        self.num_states, self.width = encoder.num_states, encoder.width
        each = [(clip, None) for clip in needed]
        self._kept = _KeptByClip(encoder, build, each, in_memory=in_memory, stored=stored)

    def encode(self, pictures: Tensor, clips: Sequence[Clip]) -> Tensor:
        """pictures: uint8 [B, H, W, 3], the first frames of these B clips → states [B, N, width]."""
        states = []
        for picture, clip in zip(pictures.split(1), clips, strict=True):

            def encode(encoder: PictureEncoder, picture: Tensor = picture) -> Tensor:
                return encoder.encode(picture)[0]

            key = {"height": clip.bucket.height, "width": clip.bucket.width}
            states.append(self._kept.value_of(clip, None, key, encode))
        self._kept.release_unneeded()
        return torch.stack(states).to(pictures.device)


class CachedLatents:
    """A codec that encodes each clip once, and keeps its latents on the host, in a folder, or in both."""

    def __init__(
        self,
        codec: Codec,
        build: Callable[[], Codec],
        needed: Iterable[tuple[Clip, Given | None]],
        *,
        in_memory: bool = True,
        stored: Stored | None = None,
        conditioning: Conditioning | None = None,
    ):
        """Arguments are those of `_KeptByClip`, and how frames that are given are encoded."""
        self.channels, self.spatial, self.latent_frames = codec.channels, codec.spatial, codec.latent_frames
        self.factor = codec.factor
        self._conditioning = conditioning
        self._kept = _KeptByClip(codec, build, needed, in_memory=in_memory, stored=stored)

    def encode(
        self, frames: Tensor, clips: Sequence[Clip] = (), given: Sequence[Given | None] | None = None
    ) -> Tensor:
        """frames: uint8 [B, T, H, W, 3] of these B clips, and what is given of each → latents [B, C, t, h, w]."""
        given = given or [None] * len(clips)
        latents = [self._latents_of(*each) for each in zip(clips, frames, given, strict=True)]
        self._kept.release_unneeded()
        return torch.stack(latents).to(frames.device)

    def _latents_of(self, clip: Clip, frames: Tensor, given: Given | None) -> Tensor:
        """frames: uint8 [T, H, W, 3] → latents [C, t, h, w] on the host."""

        how, size = self._conditioning, clip.bucket
        assert given is None or how is not None

        def encode(codec: Codec) -> Tensor:
            if given is None or how is None:
                drawn = how.drawn if clip.is_reference and how is not None else None
                return codec.encode(frames.unsqueeze(0), drawn=drawn)[0]
            return how.encode(codec, frames.unsqueeze(0), [given])[0]

        encoded: list[Any] | None = None
        if given is not None and how is not None:
            encoded = [how.place, how.others, *([] if how.drawn is None else [how.drawn])]
        key = {
            "num_frames": size.num_frames,
            "height": size.height,
            "width": size.width,
            # Without what most have not, so that what was kept before is found.
            "given": given and given[: 2 + given.are_others],
            "how": encoded,
        }
        if clip.is_reference:
            key["is_reference"] = True
            if how is not None and how.takes_references:
                key["how"] = [how.place, how.drawn]
        return self._kept.value_of(clip, given, key, encode)

    def encoder(self) -> Codec:
        """The codec itself, for what is not kept."""
        return self._kept.encoder()

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, t, h, w] to uint8 [B, T, H, W, 3]."""
        frames = self._kept.encoder().decode(latents)
        self._kept.release_unneeded()
        return frames


# Embeddings


class StoredCaptions:
    """A text encoder whose embeddings are kept in a folder, without padding; it is loaded where one is missing.

    The key has the tokens, and which are skipped, not the caption and the files of the tokenizer: the encoder is given
    no more, but the pixels of frames that it sees before a caption. Those are not foreseen, so that an encoder that was
    loaded for them stays. So a tokenizer that changes some captions costs those, whatever of its files has changed.
    """

    def __init__(
        self, outline: TextEncoder, build: Callable[[], TextEncoder], needed: Iterable[str], stored: Stored
    ):
        """`needed` are the captions that will be asked for; once all are stored, the encoder is released."""
        self.tokenizer, self.tokens, self.shape = outline.tokenizer, outline.tokens, outline.shape
        self.dtype, self.num_tokens, self._skipped = outline.dtype, outline.num_tokens, outline.skipped
        self.are_seen, self._shown = outline.are_seen, outline.shown
        self._encoder = OnDemand(lambda: stored.unchanged(build))
        self._needed, self._stored = set(needed), stored

    def encode(
        self,
        captions: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
        frames: Sequence[Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption.

        Args:
            frames: those that are read before each caption, as `TextEncoder.encode` takes them.
        """
        shown: Sequence[Sequence[Tensor] | None] = [None] * len(captions) if frames is None else frames
        rows = [self._rows(*each, device).to(dtype) for each in zip(captions, shown, strict=True)]
        length = self.shape.length if frames is None else max(map(len, rows))
        states = torch.zeros(len(captions), length, self.shape.width, dtype=dtype)
        for padded, each in zip(states, rows, strict=True):
            padded[: len(each)] = each
        if not self._needed:
            self._encoder.release()
        return states.to(device)

    def _rows(self, caption: str, frames: Sequence[Tensor] | None, device: torch.device) -> Tensor:
        """[tokens of the caption, and of the frames before it, width] on the host, in the encoder's type."""
        frames = self._shown(caption, frames)
        ids, mask = self.tokens(caption, frames)
        before = None if frames is None else [frames]
        (count,) = self.num_tokens([caption], before)
        if not count:
            self._needed.discard(caption)
            return torch.empty(0, self.shape.width, dtype=self.dtype)

        def encode() -> Tensor:
            return self._encoder.get().encode([caption], device, self.dtype, before)[0, :count].cpu()

        given = hashlib.sha256(torch.cat([ids, mask]).numpy().tobytes()).hexdigest()
        skipped = self._skipped(caption)
        key: dict[str, Any] = {"tokens": given, "skipped": [skipped.start, skipped.stop]}
        if frames is not None and len(frames):
            pixels = hashlib.sha256()
            for each in frames:
                pixels.update(each.cpu().contiguous().numpy().tobytes())
            key["frames"] = pixels.hexdigest()
            key["sizes"] = [[*each.shape[:2]] for each in frames]
        rows, is_kept = self._stored.get_or_compute(key, caption, encode)
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
        self.shape = encoder.shape
        ordered, dtype = sorted(set(captions)), encoder.dtype
        self._counts = dict(zip(ordered, encoder.num_tokens(ordered), strict=True))
        ends = list(accumulate(self._counts.values()))
        self._ends = dict(zip(ordered, ends, strict=True))
        shared, place, num_places = _shared_on_machine(max(1, ends[-1]) * self.shape.width, dtype)
        # One row for each token of each caption.
        self._rows = shared.view(-1, self.shape.width)
        for caption in ordered[place::num_places]:
            states = encoder.encode([caption], device, dtype)[0]
            self._rows_of(caption).copy_(states[: self._counts[caption]])
        gather_objects(None)  # until then another rank's rows are not there

    def encode(self, captions: Sequence[str], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Embeddings [B, length, width] of B captions; zero behind the end of a caption."""
        states = torch.zeros(len(captions), *self.shape, dtype=dtype)
        for padded, caption in zip(states, captions, strict=True):
            padded[: self._counts[caption]] = self._rows_of(caption)
        return states.to(device)

    def num_tokens(self, captions: Sequence[str]) -> list[int]:
        """How many tokens each caption has."""
        return [self._counts[caption] for caption in captions]

    def _rows_of(self, caption: str) -> Tensor:
        end = self._ends[caption]
        return self._rows[end - self._counts[caption] : end]


CaptionSource = TextEncoder | StoredCaptions | EmbeddedCaptions


def _shared_on_machine(num_elements: int, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """Memory [num_elements] that all ranks of this machine share, this rank's number among them, and how many they are.

    Raises:
        OSError: on all ranks, where one cannot have it.
    """
    host, size_bytes = socket.gethostname(), num_elements * dtype.itemsize
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = [rank for rank, other in enumerate(gather_objects(host)) if other == host]
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
    of_machine = gather_objects(path)[ranks[0]]
    if error is None and Path(of_machine).is_file() and Path(of_machine).stat().st_size == size_bytes:
        shared = torch.from_file(of_machine, shared=True, size=num_elements, dtype=dtype)
    elif error is None:
        error = f"rank {ranks[0]}, which has the same host name, has no file {of_machine!r} that is seen here"
    errors = [each for each in gather_objects(error) if each is not None]
    # All ranks have mapped it: the name can go, and the memory does with the last of them.
    if path:
        os.unlink(path)
    if errors:
        raise OSError(
            f"the embeddings of all captions ({size_bytes / 2**30:.2f} GiB) cannot lie in {tempfile.gettempdir()} "
            f"({errors[0]}); let TMPDIR name a place with room on each machine, or hold the text encoder by "
            "--text.cache False"
        )
    return shared, ranks.index(own_rank), len(ranks)
