"""Runs one microbatch of another rank again, with the same weights, and compares every bit of what it gives.

A card that computes wrong once in a day leaves no trace: gradients are averaged, and all ranks step alike by a wrong
average. So data rank d runs what data rank d + 1 has just run, with its inputs, its random numbers and the gradients of
its outputs. Ranks that share a sample do so together, each at its own place. Four data ranks, of which 2 flipped a bit:

    ran in the step           0     1     2*    3
    run again                 1     2     3     0        what rank 1 gets is not what rank 2 got
    then, on all ranks        their own twice, that of d + 1 once more, that of d + 2

The last line is run only where something differs, and names who (`verdicts`). Kernels that do not repeat themselves on
any rank are compared by sums, and what is not apart by several times their noise is let alone.

What is compared: the outputs of each block and of the model, and the gradient of each parameter before any rank adds
that of another. What the loss function, collectives of gradients and the optimizer do is not run again.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from opensora_accel.arguments import tensors_in
from opensora_accel.communications import gather_objects, without_comparing_inputs
from opensora_accel.fsdp import leaves_of
from opensora_accel.observe import ForwardCall, as_then, digest
from opensora_accel.parallel_states import (
    get_data_parallel_group,
    get_sequence_parallel_group,
    get_tensor_parallel_group,
)
from opensora_accel.watchdog import named
from opensora_accel.watching.passing import Parcel
from opensora_accel.watching.verdicts import Numbers, Run, Verdict, differing, judge, noise_of
from shardformer.spread import uncompiled

logger = logging.getLogger(__name__)

# Columns of the table whose sums say how far two runs are apart.
_SUMS = 16
_SHOWN_RANKS = 4


class Recorder:
    """From now on notes numbers of what forwards and their backwards give, until it is closed.

    Args:
        model: between steps: its parameters are shards, if it has some.
        blocks: by name. Compiled ones are left out, as hooks would have them compiled again.
        drops_gradients: each gradient is dropped when it was noted, so that no second set of them takes memory.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], *, drops_gradients: bool = False):
        self._noted: dict[str, tuple[Tensor, Tensor]] = {}
        self.has_gradients = False
        with ExitStack() as undo:
            for name, leaf in leaves_of(model).items():
                undo.callback(leaf.register_hook(self._of_gradient(name)).remove)
                if drops_gradients:
                    undo.callback(leaf.register_post_accumulate_grad_hook(_drop_gradient).remove)
            for name, block in blocks.items():
                if getattr(block, "_compiled_call_impl", None) is None:
                    undo.callback(block.register_forward_hook(self._of_output(name)).remove)
            undo.callback(model.register_forward_hook(self._of_output("the model")).remove)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Nothing is noted from now on."""
        self._undo.close()

    def run(self) -> Run:
        """What was noted; waits for the device."""
        if not self._noted:
            return {}
        digests, sums = (torch.stack(each).tolist() for each in zip(*self._noted.values(), strict=True))
        return {
            name: Numbers(number, tuple(each))
            for name, number, each in zip(self._noted, digests, sums, strict=True)
        }

    @torch.no_grad()
    def _note(self, what: str, tensor: Tensor) -> None:
        # A block that runs again in backward is noted again.
        count, key = 1, what
        while key in self._noted:
            count += 1
            key = f"{what} (run {count})"
        flat = tensor.detach().reshape(-1)
        rows = flat.numel() // _SUMS
        sums = flat[: rows * _SUMS].view(rows, _SUMS).sum(0, dtype=torch.float64)
        rest = flat[rows * _SUMS :]
        sums[: rest.numel()] += rest
        self._noted[key] = digest(tensor), sums

    def _of_output(self, name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for number, tensor in enumerate(tensors_in(output)):
                if tensor.is_floating_point():
                    self._note(f"output {number} of {name}" if number else f"the output of {name}", tensor)

        return uncompiled(note)

    def _of_gradient(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            self.has_gradients = True
            self._note(f"the gradient of {name}", gradient)

        return note


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class Replays:
    """Looks for a rank that computes something else than others do. All ranks call its methods alike.

    Args:
        blocks: of the model, by name.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]):
        self._model, self._blocks = model, blocks
        self._group, self.is_on = _peers()
        self._recorder: Recorder | None = None
        self._noise: dict[str, float] = {}
        # The last step whose microbatches came out alike, and how many looks in a row have said nothing.
        self.last_alike, self._num_empty = 0, 0

    # ---- while a step runs that will be looked at

    def before_forward(self) -> None:
        """The step's first forward is recorded, and its backward until the next forward."""
        if self._recorder is None:
            self._recorder = Recorder(self._model, self._blocks)
        else:
            self._recorder.close()

    def forget(self) -> None:
        """The step is over."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # ---- when its gradients are there

    def look(self, calls: Sequence[ForwardCall], step: int, files: Sequence[str]) -> str:
        """Which rank computes wrong, and where it shows; "" where none does. The same on all ranks.

        Gradients, buffers and random numbers are left as they were.

        Args:
            calls: the step's forwards.
            files: of this rank's samples.

        Communication: that of a forward and a backward, a microbatch's inputs to another rank, and a few object
            all-gathers; where something differs, that of up to four forwards and backwards more.
        """
        recorder = self._recorder
        self.forget()
        own: Parcel | None = None
        if recorder is not None and recorder.has_gradients and calls and calls[0].gradients:
            own = self._parcel(calls[0], recorder.run())
        if not all(gather_objects(own is not None)):
            why = "the step's first forward has no backward of its own, or arguments that cannot be pickled"
            self._say_nothing(step, why)
            return ""
        assert own is not None
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        try:
            return self._compare(own, step, files)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _parcel(self, call: ForwardCall, run: Run) -> Parcel | None:
        value = call.args, call.kwargs, call.random_state, call.autocast, call.gradients
        try:
            return Parcel(value, run, next(self._model.parameters()).device)
        except Exception:  # noqa: BLE001 - whatever pickle raises for an argument of any kind
            return None

    def _compare(self, own: Parcel, step: int, files: Sequence[str]) -> str:
        theirs, their_run = own.pass_on(self._group, 1)
        again = self._run(theirs)
        if not any(gather_objects(bool(differing(their_run, again, self._noise)))):
            self._note_alike(step)
            return ""
        mine, my_run = own.content
        size, place = self._num_peers, 0 if self._group is None else self._group.rank()
        # By the data rank whose microbatch it is, the run of the step first.
        runs = {place: [my_run, self._run(mine), self._run(mine)]}
        if size > 1:
            runs[(place + 1) % size] = [again, self._run(theirs)]
        if size > 2:
            others, _ = own.pass_on(self._group, 2)
            runs[(place + 2) % size] = [self._run(others)]
        everyone = [runs] if self._group is None else gather_objects(runs, self._group)
        verdicts = self._verdicts(everyone)
        return self._told(gather_objects((verdicts, _describe_device(), list(files))), step)

    def _run(self, microbatch: Sequence[Any]) -> Run:
        """One forward and backward of it on this rank."""
        args, kwargs, *rest = tree_map_only(Tensor, _anew, list(microbatch))
        call = ForwardCall(args, kwargs, *rest)
        for parameter in self._model.parameters():
            parameter.grad = None
        recorder = Recorder(self._model, self._blocks, drops_gradients=True)
        try:
            with as_then(self._model, call), without_comparing_inputs(), torch.enable_grad():
                outputs = tensors_in(self._model(*args, **kwargs))
                given = list(call.gradients.values())
                torch.autograd.backward([outputs[index] for index in call.gradients], given)
            return recorder.run()
        finally:
            recorder.close()

    def _verdicts(self, everyone: Sequence[Mapping[int, Sequence[Run]]]) -> dict[int, Verdict]:
        """By the data rank whose microbatch is in doubt, among the ranks at this place of their groups."""
        size = len(everyone)
        ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)
        verdicts = {}
        for owner in range(size):
            places = [(owner - shift) % size for shift in range(min(3, size))]
            runs = [(ranks[place], run) for place in places for run in everyone[place][owner]]
            noise = noise_of(runs)
            for name, each in noise.items():
                self._noise[name] = max(each, self._noise.get(name, 0.0))
            verdict = judge(runs, noise)
            if verdict is not None:
                verdicts[owner] = verdict
        return verdicts

    def _told(self, everyone: Sequence[tuple[dict[int, Verdict], str, list[str]]], step: int) -> str:
        """What the verdicts come to.

        Args:
            everyone: of each rank its verdicts, its device, and its files.
        """
        found = [(owner, verdict) for verdicts, _, _ in everyone for owner, verdict in verdicts.items()]
        if not found:
            self._note_alike(step)
            return ""
        is_of_step = all(verdict.is_of_step for _, verdict in found)
        # What spreads over the ranks of a sample is first seen near to where it began.
        owner, first = min(found, key=lambda each: each[1].place)
        if len({owner for owner, _ in found}) == self._num_peers and (
            (is_of_step and (self._num_peers > 1 or not self.last_alike))
            or (not self.last_alike and len({device.partition(",")[2] for _, device, _ in everyone}) > 1)
        ):
            why = f"no rank's microbatch gives the same bits again, first in {first.what}: the model keeps something "
            self._say_nothing(step, f"{why}from one forward to the next, or devices are of several kinds")
            return ""
        suspects = sorted({rank for _, verdict in found for rank in verdict.suspects})
        seen_on = sorted({r for at, v in found if (at, v.place) == (owner, first.place) for r in v.suspects})
        files = dict.fromkeys(file for rank in seen_on for file in everyone[rank][2])
        on = f" on {named(seen_on, 'rank')}" if len(seen_on) < len(suspects) else ""
        where = "; ".join(f"rank {rank} is {everyone[rank][1]}" for rank in suspects[:_SHOWN_RANKS])
        once = ", once and not when it ran again" if is_of_step else ""
        before = (
            f"in step {self.last_alike} all computed alike" if self.last_alike else "it is the first look"
        )
        share = f"by {first.share:.2g} of its size" if math.isfinite(first.share) else "by no finite number"
        others = "others" if self._num_peers > 1 else "before"
        return (
            f"{' or '.join(f'rank {rank}' for rank in suspects)} computes wrong{once}: with the same weights and "
            f"inputs it gives other bits than {others}, first in {first.what}{on}, "
            f"{share} ({where}{'; its files: ' if files else ''}{', '.join(files)}); {before}"
        )

    def _note_alike(self, step: int) -> None:
        self.last_alike, self._num_empty = step, 0

    def _say_nothing(self, step: int, why: str) -> None:
        """Warns of a look that said nothing; two in a row end them."""
        self._num_empty += 1
        self.is_on = self._num_empty < 2
        after = "it is tried once more" if self.is_on else "no more are tried"
        _warn(f"watch: the replay of step {step} says nothing, and {after}: {why}")

    @property
    def _num_peers(self) -> int:
        return 1 if self._group is None else self._group.size()


def _peers() -> tuple[dist.ProcessGroup | None, bool]:
    """The ranks whose microbatches this one can run, and whether that can be known."""
    if not dist.is_initialized():
        return None, True
    groups = get_data_parallel_group(), get_sequence_parallel_group(), get_tensor_parallel_group()
    num_ranks = math.prod(1 if group is None else group.size() for group in groups)
    if num_ranks != dist.get_world_size():
        _warn(
            f"watch: no microbatch is run again, as the groups of data, sequence and tensor ranks have {num_ranks} "
            f"ranks and the job has {dist.get_world_size()}; register all of them, by init_parallel(plan)"
        )
    return groups[0], num_ranks == dist.get_world_size()


def _anew(tensor: Tensor) -> Tensor:
    """The same numbers, with no part in a graph that is gone, and safe from a model that writes into its inputs."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _describe_device() -> str:
    """Which machine and card this rank has: "node-17 cuda:5, NVIDIA H200"."""
    host = socket.gethostname()
    if dist.is_initialized() and torch.cuda.is_available():
        return f"{host} cuda:{torch.cuda.current_device()}, {torch.cuda.get_device_name()}"
    return f"process {os.getpid()} on {host}, {torch.backends.cpu.get_cpu_capability()}"


def _warn(what: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s", what)
