"""The training loop: sequence-parallel flow matching on clips, the same job on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.experimental import experiment
from opensora_accel.fsdp import forget_rounding, set_last_microbatch
from opensora_accel.observe import peak_of
from opensora_accel.parallel_states import get_data_parallel_group, init_parallel, limit_waiting
from opensora_accel.profiler import explain_out_of_memory, profile, write_run_page
from opensora_accel.regions import region
from opensora_accel.training import build
from opensora_accel.training.config import ProfileOptions, TrainConfig
from opensora_accel.training.data import Batch, ClipLoader
from opensora_accel.training.encoders import (
    TextEncoder,
    build_codec,
    build_text_encoder,
    train_tokenizer,
)
from opensora_accel.training.kept import EmbeddedCaptions, StoredCaptions, free_unused
from opensora_accel.training.metrics import OffloadLog, Tracker, check_trackers, show_cache
from opensora_accel.training.objective import Objective
from opensora_accel.training.optim import (
    EMA,
    FreeAverage,
    build_optimizer,
    check_schedule_free,
    learning_rate,
    numbers_of,
    set_learning_rate,
    set_numbers,
)
from opensora_accel.training.output import COMFYUI, CONFIG, LORA, PROFILE, SAMPLES, write_text
from opensora_accel.training.pictures import PictureEncoder, build_picture_encoder
from opensora_accel.training.ranks import StopRequest, any_rank, from_first_rank
from opensora_accel.training.samples import STRIP, sample_clips, write_comparison
from opensora_accel.training.saved_state import (
    FOLDER,
    TOKENIZER,
    Record,
    Saver,
    TrainState,
    load_state,
    set_newer_aside,
)
from opensora_accel.training.stored import Stored, open_disk_cache
from opensora_accel.watching import watch
from shardformer import blocks_of, parallelize, save_lora
from shardformer.clipping import clip_grad_norm_, total_grad_norm
from shardformer.comfyui import write_comfyui_lora
from shardformer.engine import weight_dtype
from shardformer.paths import find
from shardformer.policy import find_policy

logger = logging.getLogger(__name__)

# How long ranks wait for one another after the first step, in which files are read and kernels compiled: as NCCL does.
WAITING_S = 600.0
_MAX_SKIPPED_STEPS = 10
# Gradient norms that the next one is compared with, and how few of them say nothing yet.
_NUM_NORMS, _FEWEST_NORMS = 100, 20
_MAX_SHOWN_FILES = 8
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
        self.loader = ClipLoader(
            config.data,
            seed=config.seed,
            data_rank=data_group.rank(),
            data_size=data_group.size(),
            group=dist.group.WORLD,
            digests=self.disk_cache is not None and bool(config.codec.path or config.image.path),
        )
        self.tokenizer_json = self._tokenizer(saved)
        captions = [entry.caption for entry in self.loader.entries] + list(config.sample_captions)
        # With a folder of what they computed, encoders may not be needed at all: loaded is what is asked for.
        recipe = build.recipe_of(config.model)
        build_text = partial(
            build_text_encoder, config.text, self.tokenizer_json, config.seed, self.device, self.dtype,
            is_masked=recipe.masks_text,
        )  # fmt: skip
        outline = build_text(outline=self.disk_cache is not None)
        outline.check(captions)
        # A dropped caption, and the other half of guidance, is the empty one.
        captions.append("")
        text: TextEncoder | StoredCaptions = outline
        if self.disk_cache is not None and config.text.path:
            stored = Stored.embeddings(self.disk_cache, config.text, self.device, is_masked=recipe.masks_text)
            text = StoredCaptions(outline, build_text, captions, stored)
        codec = build_codec(config.codec, self.device, self.dtype, outline=self.disk_cache is not None)
        pictures: PictureEncoder | None = None
        if config.image.is_used:
            pictures = build_picture_encoder(
                config.image, config.seed, self.device, self.dtype, outline=self.disk_cache is not None
            )
        # The model takes no memory yet, and the text encoder is gone before it does.
        model, latent_shapes = build.build_model(config, codec, text.width, self.dtype)
        encoder: TextEncoder | StoredCaptions | EmbeddedCaptions = text
        if config.text.cache:
            encoder = EmbeddedCaptions(text, captions, self.device)
        del text, outline
        free_unused()
        # The tokens of a clip of each size.
        self.num_tokens = {
            bucket: build.tokens_per_sample(shape, model) for bucket, shape in latent_shapes.items()
        }
        self.loader.balance(self.num_tokens)
        self.summary = build.describe(config, model, self.num_tokens, self.loader.portions)
        plans = {str(bucket): plan for bucket, plan in config.plans.items()}
        model, forward = parallelize(model, config.plan, self.device, plans)
        self.objective = Objective(
            config,
            recipe,
            codec,
            encoder,
            pictures,
            model,
            forward,
            latent_shapes,
            self.num_tokens,
            build.frame_rate(config.data, self.loader.videos),
            self.device,
            self.dtype,
        )
        # The plan of the batch that ran last, for what is said when memory runs out.
        self._batch_plan = config.plan
        optimizer = build_optimizer(model, config.optim)
        ema: EMA | FreeAverage | None = None
        if config.optim.schedule == "free":
            ema = FreeAverage(model, optimizer)
        elif config.optim.ema_decay:
            ema = EMA(model, config.optim.ema_decay)
        self.state = TrainState(model, optimizer, ema)
        self._saved: tuple[int, Path] | None = None
        self.saver = Saver(self.device)
        if saved is not None and record is not None:
            set_numbers(optimizer, record.optimizer or [{} for _ in optimizer.param_groups])
            load_state(saved, record, self.state)
            self.loader.load_state_dict(dataclasses.asdict(record.data))
            self._saved = self.state.step, saved
        if config.codec.cache or config.image.cache or self.disk_cache is not None:
            batches = (config.steps - self.state.step) * config.optim.accumulation
            self.objective.keep(self.loader.next_clips(batches), self.disk_cache)
        self.offload = OffloadLog(self.output, config.memory_target_gib)
        self.skipped_in_a_row, self._num_trained = 0, 0
        first = self.state.step + 1
        self.watch = None
        if config.watch:
            # Mistakes of a loop are for loops of other people: the tests hold this one against a single device.
            self.watch = watch(model, config.plan, every=config.watch, check_steps=0, first_step=first)
        self._norms = deque[float](record.norms if record else (), maxlen=_NUM_NORMS)
        # Tells them from saved states of other runs that lie beside them; kept when a run goes on.
        self._run_id = (record.run if record else None) or uuid.uuid4().hex

    def train(self, profiling: ProfileOptions | None = None) -> list[float]:
        """Trains to `config.steps` or until it is asked to stop, saves, samples; the loss of every step.

        Args:
            profiling: it is recorded where the time of so many steps went (`opensora_accel/profiler`), and the
                training ends with them; then nothing is saved at its end, and nothing sampled.

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
        watching = self.watch or nullcontext()
        with tracker or nullcontext():
            with StopRequest() as stop, profiler or nullcontext(), watching:
                while self.state.step < last:
                    started, before = time.perf_counter(), self._cache_counts()
                    # A save that failed beside the training ends it here, on all ranks.
                    with self._explained():
                        metrics = self.step(lambda: any_rank(stop.requested or self.saver.failed))
                    seconds = time.perf_counter() - started
                    if metrics is None:
                        self.saver.wait()
                        self._save_and_say_how_to_go_on()
                        show_cache(self.disk_cache, self.output)
                        return losses
                    losses.append(metrics["loss"])
                    if profiler is not None:
                        # Its tokens are those of this rank.
                        profiler.step(**metrics | {"tokens": metrics["tokens"] / self.config.plan.sequence})
                    if tracker is not None:
                        self._show_step(tracker, metrics, seconds, before)
                    self._end_step(is_first=len(losses) == 1)
                    if profiler is None and self._is_due(self.config.sample_every):
                        self.write_samples(tracker)
                        if self.is_first:
                            write_run_page(self.output)
                self.saver.wait()
                stopping = any_rank(stop.requested) or profiler is not None
            if profiler is not None:
                dist.barrier()  # whoever reads the records finds those of all ranks
            if not stopping:
                self._check_trained(len(losses))
                self._write_results(tracker)
        show_cache(self.disk_cache, self.output)
        return losses

    def num_profiled(self, profiling: ProfileOptions) -> int:
        """How many steps are to be recorded.

        Raises:
            ValueError: more than the run has left are asked for.
        """
        left = self.config.steps - self.state.step
        if left < 1 or (profiling.num_steps or 0) > left:
            asked = "profile" if profiling.num_steps is None else f"--num-steps {profiling.num_steps}"
            raise ValueError(
                f"{asked} asks for more steps than the run has left ({left} of {self.config.steps}); set --steps "
                "higher, or --num-steps lower"
            )
        return min(left, profiling.num_steps or _PROFILED_STEPS)

    def _check_trained(self, num_steps: int) -> None:
        """Fails on all ranks where each of the run's steps was skipped: what would be written was not trained."""
        if num_steps and not self._num_trained:
            raise ValueError(
                f"all {num_steps} steps were skipped, because their gradients were not finite: nothing was trained, "
                "and no weights are written; look at the clips that the warnings name, or lower --optim.lr"
            )

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

    def _explained(self) -> AbstractContextManager[Any]:
        """Around a step of a watched run on a GPU: where memory runs out, the error says what filled it and what fits.

        On a CPU that would follow every operator, and the system ends a process without asking.
        """
        if self.watch is None or self.device.type != "cuda":
            return nullcontext()
        model = self.state.model
        mlps = [mlp for path in find_policy(model).mlps for _, mlp in find(model, path)]
        return explain_out_of_memory(
            model, self.state.optimizer, lambda: self._batch_plan, blocks=blocks_of(model), mlps=mlps
        )

    def _write_results(self, tracker: Tracker | None) -> None:
        """What a whole run leaves beside its saved states: the adapter, and sampled clips."""
        if self.config.lora.rank:
            # The averaged ones, which the samples are made with.
            with self._averaged():
                path = save_lora(self.state.model, self.output / LORA)
            if self.is_first:
                print(f"the adapter for pipelines of diffusers: {path}", flush=True)
                try:
                    print(f"for ComfyUI: {write_comfyui_lora(path, path.parent / COMFYUI)}", flush=True)
                except ValueError as error:  # layers that have no name there
                    logger.warning("no adapter for ComfyUI: %s", error)
        if self.config.num_samples or self.config.sample_captions:
            strip = self.write_samples(tracker)
            if self.is_first:
                beside = " beside their sources" if self.config.num_samples else ""
                print(f"sampled clips{beside}: {strip}", flush=True)
        if self.is_first:
            print(f"the page of the run: {write_run_page(self.output)}", flush=True)

    def step(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """One optimizer step over `accumulation` global batches; its loss is the mean over all data ranks.

        `interrupted` is asked before each batch, and must say the same on all ranks. Where it says yes the step is
        given up, and the result is None: what is saved then is the state before the step, whose batches come again.

        Communication: that of the model, and an all-reduce of the loss.

        Raises:
            ValueError: this is the tenth step in a row that was skipped.
        """
        config, state = self.config.optim, self.state
        rate = learning_rate(config, state.step, self.config.steps)
        set_learning_rate(state.optimizer, rate)
        # A step that is given up is trained again, from here.
        position = self.loader.state_dict()
        total, files = torch.zeros((), dtype=torch.float64, device=self.device), list[str]()
        num_tokens, num_clips = 0, Counter[str]()
        for micro in range(config.accumulation):
            if interrupted():
                state.optimizer.zero_grad()
                self.loader.load_state_dict(position)
                return None
            with region("data"):
                batch = next(self.loader)
            files += batch.files
            of_all_ranks = len(batch.files) * self.config.plan.data
            num_tokens += of_all_ranks * self.num_tokens[batch.bucket]
            num_clips[str(batch.bucket)] += of_all_ranks
            total += self._backward(batch, is_last=micro == config.accumulation - 1)
        own_loss = total.clone()
        # Equal on all ranks of a sequence group, so the mean over the world is the mean over data ranks.
        dist.all_reduce(total)
        whole_norm = total_grad_norm(state.model)
        # Read at once, and before the optimizer is given its work: the host would wait for that too.
        loss, norm = torch.stack([total, whole_norm.to(total)]).tolist()
        if self.watch is not None:
            self.watch.loss(own_loss, files)
            self.watch.check(norm)  # before clipping hides a spike
        clip_grad_norm_(state.model, config.clip_norm, whole_norm)
        # The norm is equal on all ranks, so that all of them step, or none.
        reason = self._why_skip(norm)
        if reason is None:
            self._norms.append(norm)
            self.saver.wait_for_copy()
            state.optimizer.step()
            self._num_trained += 1
            if state.ema is not None:
                state.ema.update()
        state.optimizer.zero_grad()
        state.step += 1
        self.skipped_in_a_row = 0 if reason is None else self.skipped_in_a_row + 1
        metrics = {
            "loss": loss / dist.get_world_size(),
            "grad_norm": norm,
            "lr": rate,
            "tokens": num_tokens,
        }
        if self.config.data.buckets:
            metrics |= {f"clips/{size}": count for size, count in num_clips.items()}
        if self.watch is not None:
            if self.watch.last_look == state.step:
                metrics |= {f"grad_norm/{name}": each for name, each in self.watch.block_norms.items()}
            self.watch.step()
        if reason is not None:
            forget_rounding(state.model)
            self._warn_of_skipped(reason, own_loss, files)
        return metrics

    def _why_skip(self, norm: float) -> str | None:
        """Why the optimizer must not step with gradients of this norm; None where it may."""
        if not math.isfinite(norm):
            return f"its gradient norm is {norm}"
        factor = self.config.optim.skip_factor
        if factor and len(self._norms) >= _FEWEST_NORMS and norm > factor * statistics.median(self._norms):
            times = norm / statistics.median(self._norms)
            return (
                f"its gradient norm is {norm:.3g}, {times:.1f} times the median of {len(self._norms)} steps"
            )
        return None

    def _warn_of_skipped(self, reason: str, own_loss: Tensor, files: Sequence[str]) -> None:
        """Names the clips of a step that was skipped; `own_loss` is this rank's, a scalar.

        Communication: an object all-gather.

        Raises:
            ValueError: on all ranks, where ten steps in a row were skipped.
        """
        by_rank = gather_objects((bool(own_loss.isfinite()), list(files)))
        # The clips of ranks whose loss is not finite are to blame; where all are finite, any may be.
        blamed = [of_rank for is_finite, of_rank in by_rank if not is_finite] or [of for _, of in by_rank]
        names = list(dict.fromkeys(file for of_rank in blamed for file in of_rank))
        shown = ", ".join(names[:_MAX_SHOWN_FILES]) + (", …" if len(names) > _MAX_SHOWN_FILES else "")
        message = f"step {self.state.step} skipped: {reason}; its clips: {shown}"
        if self.is_first:
            logger.warning("%s", message)
        # One bad batch is no reason to end a run; a run of them will not recover by itself.
        if self.skipped_in_a_row >= _MAX_SKIPPED_STEPS:
            raise ValueError(
                f"{_MAX_SKIPPED_STEPS} steps in a row were skipped ({message}); lower --optim.lr, look at these clips, "
                "or resume from an earlier saved state"
            )

    def _backward(self, batch: Batch, is_last: bool) -> Tensor:
        """Adds the gradients of a batch; its part of the loss."""
        self._batch_plan = self.objective.plans.get(batch.bucket, self.config.plan)
        # Whole gradients stay local until the last batch of a step; sharded ones are reduced to their shards each time.
        forward = self.objective.forward
        local: AbstractContextManager[Any] = nullcontext()
        if isinstance(forward, nn.parallel.DistributedDataParallel) and not is_last:
            local = forward.no_sync()
        set_last_microbatch(self.state.model, is_last)
        with local:
            loss = self.objective.loss(batch) / self.config.optim.accumulation
            loss.backward()
        return loss.detach()

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
        extra = {
            "run": self._run_id,
            "config": dataclasses.asdict(self.config),
            "data": self.loader.state_dict(),
            "norms": list(self._norms),
            "optimizer": numbers_of(self.state.optimizer),
        }
        texts = {TOKENIZER: self.tokenizer_json} if self.tokenizer_json else {}
        with region("save"):
            self.saver.save(folder, self.state, extra, texts, self.config.keep_checkpoints)
        self._saved = self.state.step, folder
        if self.is_first:
            self.output.mkdir(parents=True, exist_ok=True)
            self.offload.write()
        return folder

    def write_samples(self, tracker: Tracker | None = None) -> Path:
        """Samples clips into the output, on the averaged weights; every rank has to call.

        Args:
            tracker: rank 0's, which shows them.
        """
        model = self.state.model.eval()
        with self._averaged(), torch.no_grad():
            samples = sample_clips(self.objective, self.loader.videos[: self.config.num_samples])
        model.train()
        folder = self.output / SAMPLES / f"step_{self.state.step:06d}"
        if self.is_first:
            paths = write_comparison(folder, samples)
            if tracker is not None:
                tracker.clips(self.state.step, samples, paths)
        # Whoever gets the path, on whichever rank, finds the file written.
        dist.barrier()
        return folder / STRIP

    def _averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the averaged weights, where there are any."""
        self.saver.wait_for_copy()
        return self.state.ema.applied() if self.state.ema is not None else nullcontext()

    def _cache_counts(self) -> dict[str, int]:
        """What this rank has found in the folder so far, and what not; nothing where there is no folder."""
        if self.disk_cache is None:
            return {}
        counts = self.disk_cache.counts
        return {"cache_hits": counts.hits, "cache_misses": counts.misses}

    def _tokenizer(self, saved: Path | None) -> str:
        """The tokenizer of the saved state, or one trained on all captions, as rank 0 has it."""
        if self.config.text.path:
            return ""
        captions = [entry.caption for entry in self.loader.entries]
        if saved is None:
            return from_first_rank(lambda: train_tokenizer(captions))
        return from_first_rank(lambda: (saved / TOKENIZER).read_text(encoding="utf-8"))
