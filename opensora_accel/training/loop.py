"""The training loop: sequence-parallel flow matching on clips, the same job on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from opensora_accel.experimental import experiment
from opensora_accel.observe import Forecast, peak_of
from opensora_accel.parallel_states import get_data_parallel_group, init_parallel, limit_waiting
from opensora_accel.profiler import profile, write_run_page
from opensora_accel.regions import region
from opensora_accel.training import build, configured, one_clip, summary
from opensora_accel.training.captions import TextEncoder, TextStates
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.clips import Rows
from opensora_accel.training.codec import build_codec
from opensora_accel.training.config import ProfileOptions, TrainConfig
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.encoding import Encoded, EncodedRows, Encoders
from opensora_accel.training.expert import Expert
from opensora_accel.training.kept import CaptionSource, EmbeddedCaptions, StoredCaptions, free_unused
from opensora_accel.training.loaded import check_loaded, check_weights
from opensora_accel.training.metrics import OffloadLog, StepTimes, Tracker, check_trackers, show_cache
from opensora_accel.training.objective import Objective
from opensora_accel.training.optim import check_schedule_free, set_numbers
from opensora_accel.training.output import COMFYUI, CONFIG, LORAS, PROFILE, SAMPLES, write_text
from opensora_accel.training.pictures import PictureEncoder, build_picture_encoder
from opensora_accel.training.ranks import StopRequest, any_rank, from_first_rank
from opensora_accel.training.recipes import check_rows
from opensora_accel.training.rows import Cost
from opensora_accel.training.samples import STRIP, sample_clips, write_comparison
from opensora_accel.training.saved_state import (
    FOLDER,
    TOKENIZER,
    Record,
    Saver,
    TrainState,
    load_states,
    record_of_model,
    set_newer_aside,
)
from opensora_accel.training.sound import build_sound_codec, sound_shape
from opensora_accel.training.stored import Stored, open_disk_cache
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from opensora_accel.training.validation import CONTINUED, fixed_times, validation_losses
from shardformer import blocks_of, parallelize, save_lora
from shardformer.comfyui import write_comfyui_lora
from shardformer.engine import weight_dtype

logger = logging.getLogger(__name__)

# How long ranks wait for one another after the first step, in which files are read and kernels compiled: as NCCL does.
WAITING_S = 600.0
# Where nobody says how many.
_PROFILED_STEPS = 20


class Trainer:
    """One run. Everything that its configuration can get wrong fails in the constructor, on all ranks."""

    def __init__(self, config: TrainConfig, saved: Path | None = None, record: Record | None = None):
        """A new run, or one that goes on from the saved state `saved`, whose `record` `read_record` gave.

        Raises:
            ValueError, OSError: on all ranks, for whatever the configuration gets wrong.
        """
        self.config, self.output = config, Path(config.output)
        init_parallel(config.plan, timeout_s=config.timeout_s or None)
        self.is_first = dist.get_rank() == 0
        self.device = build.local_device()
        self.dtype = weight_dtype(config.plan)
        from_first_rank(lambda: check_trackers(config))  # which alone uses them
        check_schedule_free(config.optim)
        if config.optim.state != "fp32":
            on = torch.device("cpu") if config.plan.cpu_offload else self.device
            experiment("low_bit").check_low_bit(config.optim, on)
        self.disk_cache = open_disk_cache(config.cache_folder) if config.cache_folder else None
        data_group = get_data_parallel_group()
        assert data_group is not None
        recipe = configured.recipe_of(config.model)
        self.loader = ClipLoader(
            config.data,
            seed=config.seed,
            data_rank=data_group.rank(),
            data_size=data_group.size(),
            group=dist.group.WORLD,
            digests=self.disk_cache is not None and bool(config.codec.path or config.image.path),
            held_out=config.validation.num_clips,
            sound=sound_shape(config.codec, recipe.sound) if recipe.sound else None,
            reference_unit=one_clip.reference_unit(config),
        )
        self.tokenizer_json = self._tokenizer(saved)
        captions = [entry.caption for entry in self.loader.entries] + list(config.sample_captions)
        texts = self._texts(configured.texts_of(config), captions)
        codec = build_codec(config.codec, self.device, self.dtype, outline=self.disk_cache is not None)
        pictures: PictureEncoder | None = None
        if config.image.is_used:
            outline = self.disk_cache is not None
            taken = configured.pictures_of(config)
            pictures = build_picture_encoder(
                config.image, config.seed, self.device, self.dtype, taken, outline=outline
            )
        # The model takes no memory yet, and the text encoder is gone before it does.
        first, *others = config.experts
        shapes = [text.shape for text in texts]
        conditioning = configured.conditioning_of_all([first, *others], codec)
        model, latent_shapes = build.build_model(first, codec, shapes, self.dtype)
        readers: list[CaptionSource] = [*texts]
        if config.text.cache:
            readers = [EmbeddedCaptions(text, captions, self.device) for text in texts]
        del texts
        free_unused()
        # The tokens of a clip of each size.
        self.num_tokens = {
            bucket: one_clip.tokens_per_sample(shape, model) for bucket, shape in latent_shapes.items()
        }
        cost: Cost | None = None
        if config.data.packed_tokens:
            check_rows(config, recipe, arguments_of(model))
            cost = Cost.of(
                model, recipe.num_heads(arguments_of(model)), arguments_of(model)["attention_head_dim"]
            )
        self.loader.balance(self.num_tokens, cost)
        self.summary = summary.describe(config, model, self.num_tokens, self.loader.portions)
        plans = {str(bucket): plan for bucket, plan in config.plans.items()}
        model, forward = parallelize(model, config.plan, self.device, plans, packed=cost is not None)
        check_weights(model, first)
        encoders = Encoders(
            first,
            recipe,
            codec,
            pictures,
            conditioning,
            build_sound_codec(config.codec, recipe.sound, self.device, self.dtype) if recipe.sound else None,
            arguments_of(model),
            latent_shapes,
            self.loader.frame_rate,
            self.device,
            self.dtype,
        )
        self.objective = Objective(first, recipe, encoders, readers, model, forward, self.num_tokens)
        self.saver = Saver(self.device)
        names = ("",) if not others else ("high-noise", "low-noise")
        self.experts = [Expert(names[0], first, self.objective, self.saver)]
        for name, alone in zip(names[1:], others, strict=True):
            model, _ = build.build_model(alone, codec, shapes, self.dtype)
            model, forward = parallelize(model, config.plan, self.device, plans, packed=cost is not None)
            check_weights(model, alone)
            second = self.objective.add_second(alone, model, forward)
            self.experts.append(Expert(name, alone, second, self.saver))
        self._saved: tuple[int, Path] | None = None
        if saved is not None and record is not None:
            load_states(saved, record, [expert.state for expert in self.experts])
            for expert, of_model in zip(self.experts, record.models, strict=True):
                optimizer = expert.state.optimizer
                set_numbers(optimizer, of_model.optimizer or [{} for _ in optimizer.param_groups])
                expert.norms.extend(of_model.norms)
            self.loader.load_state_dict(dataclasses.asdict(record.data))
            check_loaded(saved, record, [expert.state for expert in self.experts], self.loader.state_dict())
            self._saved = self.state.step, saved
        if config.codec.cache or config.image.cache or self.disk_cache is not None:
            batches = (config.steps - self.state.step) * config.optim.accumulation
            clips = self.loader.next_clips(batches) | self.loader.held_out_clips()
            self.objective.encoders.keep(clips, self.disk_cache)
        self.offload = OffloadLog(self.output, config.memory_target_gib)
        for expert in self.experts:
            expert.start_watching()
        # Tells them from saved states of other runs that lie beside them; kept when a run goes on.
        self._run_id = (record.run if record else None) or uuid.uuid4().hex

    @property
    def state(self) -> TrainState:
        """That of the model, or of the first expert."""
        return self.experts[0].state

    def train(self, profiling: ProfileOptions | None = None, forecast: Forecast | None = None) -> list[float]:
        """Trains to `config.steps` or until it is asked to stop, saves, samples; the loss of every step.

        Args:
            profiling: it is recorded where the time of so many steps went (`opensora_accel/profiler`), and the
                training ends with them; then nothing is saved at its end, and nothing sampled.
            forecast: of the plan; rank 0 tells it beside the step time.

        Raises:
            ValueError: ten steps in a row were skipped, or all of them.
            OSError: the output cannot be written.
        """
        losses: list[float] = []
        tracker: Tracker | None = None
        last = self.config.steps
        profiler: profile | None = None
        if profiling is not None:
            last = self.state.step + self.num_profiled(profiling)
            peak, source = peak_of(self.device, self.config.plan.precision)
            profiler = profile(
                self.state.model,
                self.config.plan,
                self.output / PROFILE,
                first_step=self.state.step + 1,
                memory_steps=[last] if profiling.follow_memory else (),
                optimizer=self.state.optimizer,
                link_bytes_per_s=profiling.link_bytes_per_s,
                peak_flops=profiling.peak_flops or peak,
                peak_flops_source="given" if profiling.peak_flops else source,
            )

        def begin() -> None:
            nonlocal tracker
            # Whatever cannot be gone on with ends the run here, where nothing of the one before is touched yet.
            tracker = Tracker(self.config, self._run_id, self.state.step, last)
            self.output.mkdir(parents=True, exist_ok=True)
            # Steps after this one are trained again, and saved again under the same names.
            for path in set_newer_aside(self.output / FOLDER, self.state.step):
                print(f"a later saved state of the run before is kept as {path}", flush=True)
            write_text(self.output / CONFIG, json.dumps(dataclasses.asdict(self.config), indent=2) + "\n")

        from_first_rank(begin)
        times = StepTimes.of(forecast, self.config.plan, len(blocks_of(self.state.model)))
        with tracker or nullcontext():
            with StopRequest() as stop, profiler or nullcontext(), self._watched():
                while self.state.step < last:
                    started, before = time.perf_counter(), self._cache_counts()
                    # A save that failed beside the training ends it here, on all ranks.
                    metrics = self.step(lambda: any_rank(stop.requested or self.saver.failed))
                    seconds = time.perf_counter() - started
                    if metrics is None:
                        self.saver.wait()
                        self._save_and_say_how_to_go_on()
                        show_cache(self.disk_cache, self.output)
                        return losses
                    losses.append(metrics["loss"])
                    if times is not None and profiler is None:
                        times.add(seconds)
                    if profiler is not None:
                        # Its tokens are those of this rank.
                        profiler.step(**metrics | {"tokens": metrics["tokens"] / self.config.plan.sequence})
                    else:
                        metrics |= self._validation_if_due()
                    if tracker is not None:
                        self._show_step(tracker, metrics, seconds, before)
                    self._end_step(is_first=len(losses) == 1)
                    if profiler is None:
                        self._sample_if_due(tracker)
                self.saver.wait()
                stopping = any_rank(stop.requested) or profiler is not None
            if profiler is not None:
                dist.barrier()  # whoever reads the records finds those of all ranks
            if not stopping:
                self._check_trained(len(losses))
                self._write_results(tracker)
        show_cache(self.disk_cache, self.output)
        return losses

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for expert in self.experts:
                stack.enter_context(expert.watch or nullcontext())
            yield

    def num_profiled(self, profiling: ProfileOptions) -> int:
        """How many steps are to be recorded.

        Raises:
            ValueError: more than the run has left are asked for, or it trains two models.
        """
        self.config.refuse_two_experts("a profile follows")
        left = self.config.steps - self.state.step
        if left < 1 or (profiling.num_steps or 0) > left:
            asked = "profile" if profiling.num_steps is None else f"--num-steps {profiling.num_steps}"
            raise ValueError(
                f"{asked} asks for more steps than the run has left ({left} of {self.config.steps}); set --steps "
                "higher, or --num-steps lower"
            )
        return min(left, profiling.num_steps or _PROFILED_STEPS)

    def _check_trained(self, num_steps: int) -> None:
        """Fails on all ranks where each of a model's steps was skipped: what would be written was not trained."""
        if num_steps and not self._num_trained:
            raise ValueError(
                f"all {num_steps} steps were skipped, because their gradients were not finite: nothing was trained, "
                "and no weights are written; look at the clips that the warnings name, or lower --optim.lr"
            )

    @property
    def _num_trained(self) -> int:
        """Steps of this process that changed every model."""
        return min(expert.num_trained for expert in self.experts)

    def _is_due(self, every: int) -> bool:
        """Whether something that is done every so many steps (0: never) is done after this one, and not at the end."""
        return every > 0 and self.state.step % every == 0 and self.state.step < self.config.steps

    def _end_step(self, is_first: bool) -> None:
        if is_first and not self.config.timeout_s:
            limit_waiting(WAITING_S)
        # Before a first step that was not skipped there is nothing new to keep.
        is_due = self._is_due(self.config.save_every) or self.state.step == self.config.steps
        if is_due and self._num_trained:
            self.save()

    def _show_step(
        self, tracker: Tracker, metrics: dict[str, float], seconds: float, before: dict[str, int]
    ) -> None:
        """Tells rank 0's tracker of a step that took so long, since the cache had these counts."""
        if self.device.type == "cuda":
            memory_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            memory_bytes = psutil.Process().memory_info().rss
        # Tokens of all data ranks.
        speed = {"tokens_per_s": metrics["tokens"] / seconds, "step_s": seconds}
        cached = {name: now - before[name] for name, now in self._cache_counts().items()}
        tracker.step(self.state.step, metrics | speed | {"memory_gib": memory_bytes / 2**30} | cached)
        self.offload.show_decisions()

    def _write_results(self, tracker: Tracker | None) -> None:
        """What a whole run leaves beside its saved states: the adapter, and sampled clips."""
        if self.config.lora.is_used:
            # The averaged ones, which the samples are made with.
            with self._averaged():
                for expert, folder in zip(self.experts, LORAS, strict=False):
                    self._export_adapter(expert, self.output / folder)
        if self.config.num_samples or self.config.sample_captions:
            strip = self.write_samples(tracker)
            if self.is_first:
                beside = " beside their sources" if self.config.num_samples else ""
                print(f"sampled clips{beside}: {strip}", flush=True)
        if self.is_first:
            print(f"the page of the run: {write_run_page(self.output)}", flush=True)

    def _export_adapter(self, expert: Expert, folder: Path) -> None:
        path = save_lora(expert.state.model, folder)
        if not self.is_first:
            return
        of = f" of the {expert.name} expert" if expert.name else ""
        whom = "PEFT" if self.objective.recipe.home else "pipelines of diffusers"
        print(f"the adapter{of} for {whom}: {path}", flush=True)
        if self.objective.recipe.home:
            return
        try:
            print(f"for ComfyUI: {write_comfyui_lora(path, path.parent / COMFYUI)}", flush=True)
        except ValueError as error:  # layers that have no name there
            logger.warning("no adapter for ComfyUI: %s", error)

    def step(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """One optimizer step over `accumulation` global batches; its loss is the mean over all data ranks.

        `interrupted` is asked before each batch, and must say the same on all ranks. Where it says yes the step is
        given up, and the result is None: what is saved then is the state before the step, whose batches come again.

        Communication: that of the model, and an all-reduce of the loss.

        Raises:
            ValueError: this is the tenth step in a row that was skipped.
        """
        rates = [expert.begin() for expert in self.experts]
        # A step that is given up is trained again, from here.
        position = self.loader.state_dict()
        files, kept = list[str](), list[Encoded | EncodedRows]()
        num_tokens, num_clips = 0, Counter[str]()
        first, *others = self.experts
        accumulation = self.config.optim.accumulation
        with first.explained():
            for micro in range(accumulation):
                if interrupted():
                    first.give_up()
                    self.loader.load_state_dict(position)
                    return None
                with region("data"):
                    batch = next(self.loader)
                files += batch.files
                encoded: Encoded | EncodedRows
                if isinstance(batch, Rows):
                    counts, encoded = batch.num_clips, self.objective.encoders.encode_rows(batch)
                else:
                    counts = Counter({batch.bucket: len(batch.files) * self.config.plan.data})
                    encoded = self.objective.encoders.encode(batch)
                for bucket, count in counts.items():
                    num_tokens += count * self.num_tokens[bucket]
                    num_clips[str(bucket)] += count
                if others:
                    kept.append(encoded)
                first.backward(encoded, is_last=micro == accumulation - 1)
            found = [first.update(files)]
        for expert in others:
            # It is not asked any more whether to stop: the first one has stepped.
            with expert.explained():
                for micro, encoded in enumerate(kept):
                    expert.backward(encoded, is_last=micro == accumulation - 1)
                found.append(expert.update(files))
        metrics = found[0]
        if others:
            # What a run has one of is the mean; the norm is that over all parameters.
            metrics = {
                f"{key}/{expert.name}": value
                for expert, each in zip(self.experts, found, strict=True)
                for key, value in each.items()
            }
            metrics["loss"] = statistics.fmean(each["loss"] for each in found)
            metrics["grad_norm"] = math.hypot(*(each["grad_norm"] for each in found))
            if self.config.optim.algorithm == "prodigy":  # each finds its own
                metrics |= {
                    f"lr/{expert.name}": rate for expert, rate in zip(self.experts, rates, strict=True)
                }
        metrics |= {"lr": rates[0], "tokens": num_tokens}
        if self.config.data.buckets:
            metrics |= {f"clips/{size}": count for size, count in num_clips.items()}
        return metrics

    def _save_and_say_how_to_go_on(self) -> None:
        step = self.state.step
        if self._saved is None and step == 0:
            if self.is_first:
                print("stopped before the first step: there is nothing to save", flush=True)
            return
        if self._saved is None or self._saved[0] != step:
            if self.is_first:
                print(f"saving step {step}", flush=True)
            self.save()
            self.saver.wait()
        if self.is_first and self._saved is not None:
            print(f"stopped after step {step}; go on with --resume {self._saved[1]}", flush=True)

    def save(self) -> Path:
        """Starts to write a saved state of the present step, beside the next steps; every rank has to call.

        Raises:
            OSError: on all ranks, where it cannot be written, or the one before could not be.
        """
        folder = self.output / FOLDER / f"step_{self.state.step:06d}"
        first, *others = (record_of_model(expert.state, expert.norms) for expert in self.experts)
        extra = {
            "run": self._run_id,
            "config": dataclasses.asdict(self.config),
            "data": self.loader.state_dict(),
            "second": others[0] if others else None,
            **first,
        }
        texts = {TOKENIZER: self.tokenizer_json} if self.tokenizer_json else {}
        with region("save"):
            self.saver.save(
                folder,
                [expert.state for expert in self.experts],
                extra,
                texts,
                self.config.keep_checkpoints,
            )
        self._saved = self.state.step, folder
        if self.is_first:
            self.output.mkdir(parents=True, exist_ok=True)
            self.offload.write()
        return folder

    def _sample_if_due(self, tracker: Tracker | None) -> None:
        if self._is_due(self.config.sample_every):
            self.write_samples(tracker)
            if self.is_first:
                write_run_page(self.output)

    def _validation_if_due(self) -> dict[str, float]:
        """The losses of held-out clips, where they are looked at after this step."""
        config = self.config.validation
        is_last = self.state.step == self.config.steps
        if not config.num_clips or not (is_last or self.state.step % config.every == 0):
            return {}
        return self.validate()

    def validate(self) -> dict[str, float]:
        """The losses of held-out clips, with the averaged weights; every rank has to call, and gets the same."""
        times = fixed_times(self.config.flow.time_range, self.config.validation.num_times)
        with self._averaged():
            losses = validation_losses(self.objective, self.loader, times)
        if self.is_first:
            mean, *by_time = losses.values()
            each = ", ".join(f"{loss:.4f} at {time:g}" for loss, time in zip(by_time, times, strict=False))
            if CONTINUED in losses:
                each += f"; {losses[CONTINUED]:.4f} of clips that go on"
            print(f"step {self.state.step}: validation loss {mean:.4f} ({each})", flush=True)
        return losses

    def write_samples(self, tracker: Tracker | None = None) -> Path:
        """Samples clips into the output, on the averaged weights; every rank has to call.

        Args:
            tracker: rank 0's, which shows them.
        """
        with self._averaged(), torch.no_grad():
            videos = self.loader.videos[: self.config.num_samples]
            samples = sample_clips(self.objective, videos, self.config.sample_captions)
        folder = self.output / SAMPLES / f"step_{self.state.step:06d}"
        if self.is_first:
            paths = write_comparison(folder, samples)
            if tracker is not None:
                tracker.clips(self.state.step, samples, paths)
        # Whoever gets the path, on whichever rank, finds the file written.
        dist.barrier()
        return folder / STRIP

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within it every model is as it is used: in evaluation mode, with averaged weights where there are any."""
        self.saver.wait_for_copy()
        with ExitStack() as stack:
            for expert in self.experts:
                stack.enter_context(expert.averaged())
            yield

    def _cache_counts(self) -> dict[str, int]:
        """What this rank has found in the folder so far, and what not; nothing where there is no folder."""
        if self.disk_cache is None:
            return {}
        counts = self.disk_cache.counts
        return {"cache_hits": counts.hits, "cache_misses": counts.misses}

    def _texts(self, taken: Sequence[TextStates], captions: list[str]) -> list[TextEncoder | StoredCaptions]:
        """The family's encoders of captions; the empty one is added to these."""
        config, cache = self.config.text, self.disk_cache
        texts: list[TextEncoder | StoredCaptions] = []
        for number in range(len(taken)):
            build = partial(
                build_text_encoder,
                config, self.tokenizer_json, self.config.seed, self.device, self.dtype, taken, number,
            )  # fmt: skip
            # With a folder of what it computed, an encoder may not be needed at all: loaded is what is asked for.
            outline = build(outline=cache is not None)
            outline.check(captions)
            texts.append(outline)
            if cache is not None and config.path:
                stored = Stored.embeddings(cache, config, self.device, taken, number)
                texts[number] = StoredCaptions(outline, build, [*captions, ""], stored)
        # A dropped caption, and the other half of guidance, is the empty one.
        captions.append("")
        return texts

    def _tokenizer(self, saved: Path | None) -> str:
        """The tokenizer of the saved state, or one trained on all captions, as rank 0 has it."""
        if self.config.text.path:
            return ""
        captions = [entry.caption for entry in self.loader.entries]
        if saved is None:
            return from_first_rank(lambda: train_tokenizer(captions))
        return from_first_rank(lambda: (saved / TOKENIZER).read_text(encoding="utf-8"))
