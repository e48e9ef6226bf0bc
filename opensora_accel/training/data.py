"""Folders of videos and images as training batches that do not depend on how many ranks read them.

The draw of every sample follows from (seed, position), where the position counts samples over the whole job. Each data
rank takes its contiguous share of every global batch. Example for P = 3 data ranks and a batch of 6: the first batch
holds positions 0 … 5, rank 0 reads 0 and 1, rank 1 reads 2 and 3, rank 2 reads 4 and 5; one rank alone would read all
six, and the same clips. So a saved position resumes on any number of ranks. A file that turns out bad is set aside on
all ranks together, and the next usable one takes its place.

Where clips have several sizes, a global batch is of one of them (`buckets.py`), and a seeded permutation says in each
epoch which comes when. With 12 small videos in batches of 6 and 3 large ones in batches of 3, an epoch has the batches
small, small, large in some order: positions 0 … 5, 6 … 11 and 12 … 14 of the first epoch where this is the order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from opensora_accel.communications import gather_objects
from opensora_accel.training.beside import with_controls, with_masks, with_references
from opensora_accel.training.buckets import Bucket, batch_sizes
from opensora_accel.training.clips import (
    NO_DIGESTS,
    Batch,
    Clip,
    Digests,
    Rows,
    Sample,
    VideoFolder,
    clip_of,
    frame_rate,
)
from opensora_accel.training.entries import Entry, entries_of
from opensora_accel.training.flow import generator
from opensora_accel.training.ranks import any_rank, from_first_rank
from opensora_accel.training.rows import RowSampler, check_room
from opensora_accel.training.sampler import GlobalBatchSampler, Portion, check_divides
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.sound import SoundShape
from opensora_accel.training.video import (
    Video,
    index_videos,
    nothing_usable,
)

logger = logging.getLogger(__name__)


class ClipLoader:
    """Endless iterator over this data rank's batches, the same for any number of data ranks.

    Iterating again goes on where the last loop stopped. `quarantined` maps every file that was set aside to
    the reason, on every rank.

    Args:
        seed: equal on all ranks; orders the videos and places the clips in them.
        data_rank, data_size: which share of the global batch this rank reads. Ranks of a sequence or tensor
            group have the same data rank and get the same clips.
        group: a process group that covers all ranks of the job, or None in a single process. Prefer gloo:
            with NCCL the check after each batch waits for the GPU.
        digests: the clips of a batch have the SHA-256 sums of their files.
        held_out: so many files, chosen by the seed, are in no batch; `held_out_batches` has a clip of each.
        sound: how the sound of clips is read; None leaves it out.
        reference_unit: pixels of which sides are multiples, of references in their own shapes.

    Communication: at the start one object broadcast from rank 0, which alone reads the headers. Per batch an
    all-reduce of one number; only after a failure an all-gather of the failures' texts.

    Raises:
        FileNotFoundError, ValueError: on all ranks, for a folder without usable videos.
        ValueError: on all ranks, from `next`, when the last usable video has failed.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        data_rank: int,
        data_size: int,
        group: dist.ProcessGroup | None,
        digests: bool = False,
        held_out: int = 0,
        sound: SoundShape | None = None,
        reference_unit: int = 1,
    ) -> None:
        # A batch that does not divide must fail here, on all ranks, before the first collective.
        check_divides(config.batch_size, data_size, "--data.batch_size")
        for bucket in config.sizes:
            check_divides(bucket.batch_size or data_size, data_size, f"--data.buckets {bucket}:")
        self.config, self.position = config, 0
        # Of the step that is handed out; the sampler that reads is ahead of it.
        self._row_plan: RowSampler | None = None
        # Where clips share rows: how many tokens one of each bucket has, and what it costs.
        self._of_rows: tuple[Mapping[Bucket, int], Callable[[int], float]] | None = None
        self.quarantined: dict[str, str] = {}
        self._batches: Iterator[list[Sample]] | None = None
        self._seed, self._data_rank, self._data_size, self._group = seed, data_rank, data_size, group
        self._is_first, self._digests = group is None or dist.get_rank(group) == 0, digests
        self._sound = sound

        def look_at_folder() -> tuple[list[Entry], list[Video], dict[str, str]]:
            entries = entries_of(config)
            usable, unreadable = index_videos(entries, config.root, config)
            usable, wrongly_masked = with_masks(usable, config)
            usable, wrongly_controlled = with_controls(usable, config)
            usable, without_references = with_references(usable, config, reference_unit)
            set_aside = unreadable | wrongly_masked | wrongly_controlled | without_references
            return entries, usable, set_aside

        # Every file that is named, usable or not.
        self.entries, usable, self._unreadable = (
            look_at_folder() if group is None else from_first_rank(look_at_folder, group)
        )
        self._usable = {video.file: video for video in usable}
        # Of all files, so that one which has gone bad, or was repaired, moves no other to the other side.
        order = torch.randperm(len(self.entries), generator=generator(seed, "held out", 0)).tolist()
        self._held_out = [self.entries[index].file for index in order[:held_out]]
        if held_out and not set(self._usable) - set(self._held_out):
            raise ValueError(
                f"validation.num_clips holds out {held_out} of {len(self.entries)} files in {config.root}, and "
                "none is left to train on; set it lower, or add clips"
            )
        if held_out and not set(self._usable) & set(self._held_out):
            raise ValueError(
                f"none of the files that validation.num_clips={held_out} holds out can be read; repair them, set it "
                "higher, or set another seed, by which they are chosen"
            )
        self._batch_sizes = {bucket: bucket.batch_size or config.batch_size for bucket in config.sizes}
        self.frame_rate = frame_rate(
            config, [video for file, video in self._usable.items() if file not in self._held_out]
        )
        self._begin(0, excluded=self._unreadable, quarantined=self._unreadable)
        if self._is_first and self.quarantined:
            reasons = "\n  ".join(list(self.quarantined.values())[:5])
            logger.warning(
                "set aside %d of %d videos in %s; the first reasons:\n  %s",
                len(self.quarantined),
                len(self.entries),
                config.root,
                reasons,
            )
        if self._is_first and sound is not None:
            self._warn_of_silence()

    def _warn_of_silence(self) -> None:
        """Warns of videos whose sound is not learned, because they have none or another frame rate."""
        silent = [video for video in self.videos if not self._folder.has_sound(video)]
        other = [video for video in silent if video.info is not None and video.info.has_sound]
        if not silent:
            return
        first = other[0] if other else silent[0]
        why = "they have none"
        if other:
            assert first.info is not None
            why = (
                f"{len(other)} of them have another frame rate than this run's {self.frame_rate:g}, so that their "
                f"sound would not last as long as their frames, as {first.file} with {first.info.fps:g}: bring them to "
                f"one rate, as `ffmpeg -i FILE -r {self.frame_rate * self.config.frame_stride:g}` does"
            )
        logger.warning(
            "%d of %d videos are learned without sound, %s among them: %s",
            *(len(silent), len(self.videos), first.file, why),
        )

    @property
    def videos(self) -> list[Video]:
        """The videos that are trained on."""
        return [video for video in self._videos if video.file not in self.quarantined]

    @property
    def portions(self) -> list[Portion]:
        """The buckets that have videos, with their batches."""
        return self._portions

    def held_out_batches(self) -> Iterator[tuple[Batch, bool]]:
        """This data rank's clips of the files that are held out, the same in every look, and whether each counts.

        One at a time, with positions -1, -2, … of the job, which no clip that is trained has. All ranks get as many: a
        clip that cannot be read, or that this rank has one fewer of, is black and does not count.
        """
        videos, share = self._held_out_share()
        folder = self._folder_of(videos)
        for number, is_own in share:
            sample, bucket = folder[(-1 - number, number)], videos[number].bucket
            frames = sample.frames
            if frames is None:
                logger.warning("a clip is left out of the validation: %s", sample.error)
                frames = torch.zeros(bucket.num_frames, bucket.height, bucket.width, 3, dtype=torch.uint8)
            clip = self._clip(sample.file, sample.position, sample.digests)
            mask = None if sample.mask is None else sample.mask[None]
            if self.config.masks and mask is None:
                mask = torch.zeros(frames[None].shape[:-1], dtype=torch.uint8)
            of_clip = [sample.caption], [sample.position], [sample.file], [clip], [sample.sound]
            beside = self._controls([sample], frames), self._references([sample])
            batch = Batch(frames[None], *of_clip, mask, *beside)
            yield batch, is_own and sample.frames is not None

    def held_out_clips(self) -> dict[int, Clip]:
        """Those of `held_out_batches`, by position; nothing is read."""
        videos, share = self._held_out_share()
        return {-1 - number: self._clip(videos[number].file, -1 - number) for number, _ in share}

    def _held_out_share(self) -> tuple[list[Video], list[tuple[int, bool]]]:
        """The videos that are held out; which this data rank has, by number, and whether they are its own to count."""
        videos = [self._usable[file] for file in self._held_out if file in self._usable]
        last = len(videos) - 1
        numbers = range(self._data_rank, len(videos) + self._data_rank, self._data_size)
        return videos, [(min(number, last), number <= last) for number in numbers]

    def balance(self, tokens: Mapping[Bucket, int], cost: Callable[[int], float] | None = None) -> None:
        """From the start of the job on, batches of each bucket have as many clips as the largest has tokens for.

        Args:
            tokens: of a clip of each bucket.
            cost: of a clip of so many tokens; then clips share rows, and a step has as many rows as a batch has clips.

        Raises:
            ValueError: a clip has more tokens than a row.
        """
        if cost is not None:
            check_room(tokens, self.config.packed_tokens)
            self._of_rows = tokens, cost
            self._begin(0, excluded=self._excluded, quarantined=self.quarantined)
        elif self.config.buckets:
            filled = [portion.bucket for portion in self._portions]
            self._batch_sizes |= batch_sizes(tokens, self.config.batch_size, filled)
            self._begin(0, excluded=self._excluded, quarantined=self.quarantined)

    def _clip(self, file: str, position: int, digests: Digests = NO_DIGESTS) -> Clip:
        """Which clip of a file this position has."""
        video = self._usable[file]
        return clip_of(video, self._folder.start(video, position), digests)

    def _controls(self, samples: Sequence[Sample], like: Tensor) -> Tensor | None:
        """uint8 [b, T, H, W, 3], black where a sample has none; None where the run has no controls."""
        if not self.config.controls:
            return None
        return torch.stack(
            [torch.zeros_like(like) if each.control is None else each.control for each in samples]
        )

    def _references(self, samples: Sequence[Sample]) -> list[Sequence[Tensor]] | None:
        """uint8 [H, W, 3] of each, black where a sample could not be read; None where the run has no references."""
        if not self.config.references:
            return None
        return [
            [
                torch.zeros(size.height, size.width, 3, dtype=torch.uint8)
                for size in self._usable[each.file].references
            ]
            if each.references is None
            else each.references
            for each in samples
        ]

    def next_clips(self, num_batches: int) -> dict[int, Clip]:
        """The clip of each position that this data rank reads in the next batches, if no more files turn out bad."""
        # A sampler of its own, because the loader's goes on with the training.
        keys = itertools.chain.from_iterable(itertools.islice(self._sampler(), num_batches))
        return {
            position: self._clip(self._videos[video_index].file, position) for position, video_index in keys
        }

    def __iter__(self) -> ClipLoader:
        return self

    def __next__(self) -> Batch | Rows:
        if self._batches is None:
            self._batches = self._new_batches()
        samples = self._replace_failures(next(self._batches))
        if self._of_rows is not None:
            return self._rows(samples)
        # Counted when a batch is handed out. The sampler is ahead of it by what the workers have read.
        size = self._batch_sizes[self._usable[samples[0].file].bucket]
        # Where a rank's first sample is: what other data ranks hold of the batch lies before it and behind it.
        self.position = samples[0].position - self._data_rank * size // self._data_size + size
        return self._batch(samples)

    def _rows(self, samples: list[Sample]) -> Rows:
        """The rows of the step at `position`, which these samples of this rank stand in one behind the other."""
        if self._row_plan is None:
            self._row_plan = self._row_sampler()
        sampler = self._row_plan
        everyones = sampler.rows(self.position)
        num_clips = Counter(sampler.bucket(self.position + each) for row in everyones for each in row)
        rows, rest = [], iter(samples)
        for row in sampler.own:
            of_row = itertools.islice(rest, len(everyones[row]))
            rows.append([self._batch([sample]) for sample in of_row])
        self.position += num_clips.total()
        return Rows(rows, num_clips)

    def _batch(self, samples: list[Sample]) -> Batch:
        return Batch(
            torch.stack([sample.frames for sample in samples if sample.frames is not None]),
            [sample.caption for sample in samples],
            [sample.position for sample in samples],
            [sample.file for sample in samples],
            [self._clip(sample.file, sample.position, sample.digests) for sample in samples],
            [sample.sound for sample in samples],
            torch.stack([sample.mask for sample in samples if sample.mask is not None])
            if self.config.masks
            else None,
            None if samples[0].frames is None else self._controls(samples, samples[0].frames),
            self._references(samples),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that decides the next batches, as plain JSON: equal on all ranks, and good for any number of them."""
        return {
            "position": self.position,
            "order": self._order_id(),
            "excluded": sorted(self._excluded),
            "quarantined": dict(sorted(self.quarantined.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the last batch of the saved run; call it with the same state on all ranks.

        The order of the videos is that of the saved run also if files have gone bad since, or have been
        repaired: what was set aside stays so. If the list of videos, the seed or the clip length is another,
        the position is kept, the order is new, and a warning says so.

        Raises:
            ValueError: the state lacks something, or all of its videos were set aside.
        """
        missing = {"position", "order", "excluded", "quarantined"} - set(state)
        if missing:
            raise ValueError(f"the saved state of the data lacks {sorted(missing)}; it has {sorted(state)}")
        if state["order"] == self._order_id():
            quarantined = {**self._unreadable, **state["quarantined"]}
            self._begin(state["position"], excluded=state["excluded"], quarantined=quarantined)
            return
        if self._is_first:
            logger.warning(
                "the videos, the seed, the clip length, the buckets or what is held out are not those of the saved "
                "run: training goes on at sample %d, in a new order",
                state["position"],
            )
        self._begin(state["position"], excluded=self._unreadable, quarantined=self._unreadable)

    def _order_id(self) -> str:
        """Equal exactly if the videos come in the same order with the same start frames."""
        config = self.config
        content: list[Any] = [
            [entry.file for entry in self.entries],
            self._seed,
            config.num_frames,
            config.frame_stride,
        ]
        if config.buckets:
            # A file that has gone bad or has been repaired since is in no bucket, or in one: their orders change.
            buckets = {video.file: str(video.bucket) for video in self._usable.values()}
            content += [buckets, [(str(bucket), size) for bucket, size in self._batch_sizes.items()]]
        if config.packed_tokens:
            content.append([config.packed_tokens, config.batch_size])
        if config.folders:
            content.append([entry.times for entry in self.entries])
        if self._held_out:
            content.append(self._held_out)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _begin(self, position: int, *, excluded: Iterable[str], quarantined: Mapping[str, str]) -> None:
        """Sets the order of the videos and where in it to go on; forgets what was read ahead."""
        self.position, self._batches = position, None
        self._row_plan = None
        self.quarantined, self._excluded = dict(quarantined), frozenset(excluded)
        self._videos = [
            # One that has gone bad since the run was saved keeps its place in the order, where another stands in.
            self._usable.get(entry.file) or Video(entry.file, entry.caption, None, self.config.sizes[0])
            for entry in self.entries
            if entry.file not in self._excluded and entry.file not in self._held_out
        ]
        self._folder = self._folder_of(self._videos)
        # Not a method: the sampler would refer back to this loader, and workers that are collected as part
        # of a cycle take five seconds each to stop.
        self._substitute = partial(_stand_in, self._videos, self.quarantined)
        indices: dict[Bucket, list[int]] = {bucket: [] for bucket in self.config.sizes}
        times = {entry.file: entry.times for entry in self.entries}
        for index, video in enumerate(self._videos):
            indices[video.bucket] += [index] * times[video.file]
        self._portions = [
            Portion(bucket, videos, self._batch_sizes[bucket]) for bucket, videos in indices.items() if videos
        ]
        self._check_any_left()

    def _folder_of(self, videos: Sequence[Video]) -> VideoFolder:
        return VideoFolder(
            videos,
            self.config,
            seed=self._seed,
            digests=self._digests,
            sound=self._sound,
            frame_rate=self.frame_rate,
        )

    def _new_batches(self) -> Iterator[list[Sample]]:
        """Reads from `position` on; workers read ahead of it, which is why the loader counts by itself."""
        with warnings.catch_warnings():
            # torchdata 0.11 calls it, torch 2.13 deprecates it: nothing that a user could act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            # `collate_fn=list`, because a sample that could not be read has no frames to stack.
            loader = StatefulDataLoader(
                self._folder,
                batch_sampler=self._sampler(),
                num_workers=self.config.num_workers,
                collate_fn=list,
            )
        return iter(loader)

    def _sampler(self) -> GlobalBatchSampler | RowSampler:
        """From `position` on."""
        if self._of_rows is not None:
            return self._row_sampler()
        sampler = GlobalBatchSampler(
            self._portions,
            self._data_rank,
            self._data_size,
            self._seed,
            substitute=self._substitute,
        )
        sampler.position = self.position
        return sampler

    def _row_sampler(self) -> RowSampler:
        assert self._of_rows is not None
        tokens, cost = self._of_rows
        sampler = RowSampler(
            self._portions,
            tokens,
            cost,
            self.config.batch_size,
            self.config.packed_tokens,
            self._data_rank,
            self._data_size,
            self._seed,
            substitute=self._substitute,
        )
        sampler.position = self.position
        return sampler

    def _replace_failures(self, samples: list[Sample]) -> list[Sample]:
        """The samples with every video that any rank could not read replaced, on all ranks alike."""
        while True:
            samples = [
                sample
                if sample.file not in self.quarantined
                else self._folder[(sample.position, self._substitute(sample.video_index))]
                for sample in samples
            ]
            # A replacement may be bad too, on another rank: until no rank has a failure.
            failures = {sample.file: sample.error for sample in samples if sample.error is not None}
            # One number for each batch; texts are exchanged only where some rank has a failure.
            if not (any_rank(bool(failures), self._group) if self._group is not None else failures):
                return samples
            everyones = [failures] if self._group is None else gather_objects(failures, self._group)
            # In the ranks' order, so that all of them write the same state.
            for file, reason in (item for of_rank in everyones for item in of_rank.items()):
                if file not in self.quarantined:
                    self.quarantined[file] = reason
                    if self._is_first:
                        count, total = len(self.quarantined), len(self.entries)
                        logger.warning("set aside a video (%d of %d so far): %s", count, total, reason)
            self._check_any_left()

    def _check_any_left(self) -> None:
        left = {video.bucket for video in self._videos if video.file not in self.quarantined}
        if not left:
            raise ValueError(nothing_usable(self.config.root, self.quarantined))
        for portion in self._portions:
            if portion.bucket not in left:
                raise ValueError(
                    f"all {len(portion.videos)} files of the bucket {portion.bucket} have been set aside; repair them, "
                    "or leave that size out of --data.buckets and go on with --resume"
                )


def _stand_in(videos: Sequence[Video], quarantined: Mapping[str, str], video_index: int) -> int:
    """The video itself, or the next one of its bucket in the order of the folder that has not been set aside.

    Applied twice, with a quarantine that grew in between, it gives what the grown one gives alone: it does
    not matter whether a batch was read ahead before or after a failure.
    """
    bucket = videos[video_index].bucket
    following = ((video_index + n) % len(videos) for n in range(len(videos)))
    return next(
        index
        for index in following
        if videos[index].bucket == bucket and videos[index].file not in quarantined
    )
