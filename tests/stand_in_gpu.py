"""A device that is no CPU and computes nothing, on which a step is watched for what would stop a GPU's queue.

torch lets one device type be defined in Python. On fake tensors such a device takes any operator, forward and backward,
as a GPU would be given it, and no number ever exists. Whoever asks for one (`.item()`, `.tolist()`, `bool()`, a size
that depends on values) waits for the device; so does a copy from memory that is not page-locked.

The device is there for the rest of the process: run this as a program, `python -m tests.stand_in_gpu PLAN MODEL …`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from pathlib import Path

import torch
import torch._C._acc as acc
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_accel.observe.fakes import FakeFloats

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "standin"  # letters only: a mesh takes a digit for an index


class _Module:
    """What torch asks of `torch.<device>`."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.zeros(16, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


class _Hooks(acc.PrivateUse1Hooks):
    def is_available(self):
        return True

    def is_built(self):
        return True

    def has_primary_context(self, _index):
        return True


class _Guard(acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


_kept = _Hooks(), _Guard()  # torch refers to them, and does not keep them


def start():
    """Defines the device, and a backend that sends nothing on it. For the rest of the process."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _Module)
    acc.register_python_privateuseone_hook(_kept[0])
    acc.register_python_privateuseone_device_guard(_kept[1])
    # torch's backend that sends nothing, for this device too.
    dist.Backend.backend_capability["fake"].append(DEVICE)
    dist.Backend.default_device_backend_map[DEVICE] = "fake"


class Synchronisations(TorchDispatchMode):
    """Notes every operator of this project that would wait for the device, with the line that asked for it.

    Models wait by themselves in places. That is let pass, with numbers that let the rest be watched.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = [tensor.device.type for tensor in tensors]
        if (
            name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
            and DEVICE in devices
        ):
            is_ours = self.note(name)
            if name == "_local_scalar_dense":
                # A mask is asked whether it is padding, and whether it hides nothing: yes, and no.
                return len(self.found) % 2 if is_ours else 1
            if name == "nonzero":  # as if all were true
                return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
            if name == "masked_select":
                return args[0].new_empty(args[0].numel())
        if name == "repeat_interleave" and devices == [DEVICE] and hasattr(args[0], "numbers"):
            return on_device(func(args[0].numbers))
        if name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.note("an index of bools")
            return args[0].flatten(0, args[1][0].dim() - 1)
        if name == "copy_" and devices[0] != devices[1]:
            self.note(f"a copy from {devices[1]} to {devices[0]}")
        if name == "_to_copy" and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"]).type
            if target != devices[0]:
                self.note(f"a copy from {devices[0]} to {target}")
            if target == DEVICE:
                return on_device(args[0], kwargs.get("dtype"))
        return func(*args, **kwargs)

    def note(self, what):
        """Whether a line of this project asked for it, which is noted then."""
        for frame in reversed(traceback.extract_stack()):
            # torch's own frames, and functions that only pass on what the model calls.
            if "/torch/" in frame.filename or frame.name.startswith("__torch_") or frame.filename == __file__:
                continue
            is_ours = frame.filename.startswith((str(ROOT / "opensora_accel"), str(ROOT / "shardformer")))
            if is_ours:
                self.found.append(
                    f"{what}: {Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.line}"
                )
            return is_ours
        return False


class TensorsOfNumbers(TorchFunctionMode):
    """`torch.tensor(numbers, device=…)` as it is on a GPU: made on the host, and copied."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            function in (torch.tensor, torch.as_tensor)
            and torch.device(kwargs.get("device") or "cpu").type == DEVICE
        ):
            del kwargs["device"]
            numbers = function(*args, **kwargs)
            moved = numbers.to(DEVICE)
            moved.numbers = numbers  # for sizes that a model computes from them
            return moved
        return function(*args, **kwargs)


def on_device(tensor, dtype=None):
    """A tensor like this one, without its numbers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=DEVICE)


def move(model):
    """Every parameter and buffer of a model becomes one of the device."""
    moved = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in moved:
                    moved[id(tensor)] = on_device(tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        moved[id(tensor)] = torch.nn.Parameter(moved[id(tensor)], tensor.requires_grad)
                held[name] = None if tensor is None else moved[id(tensor)]
        for name, value in vars(module).items():  # tables that are no buffers
            if isinstance(value, torch.Tensor):
                setattr(module, name, on_device(value))


def watch(name, plan):
    """What of this project waits for the device in the second step of a model under a plan; the first one learns."""
    import shardformer
    from opensora_accel import init_parallel, parallel_states
    from opensora_accel.arguments import value_at
    from tests.video_models import CASES
    from tests.video_models.case import change_tensors

    case = CASES[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        with FakeFloats():
            init_parallel(plan, device_type=DEVICE)
        model, inputs = case.make(), case.inputs()
        with FakeFloats(), TensorsOfNumbers():
            move(model)
            shardformer.shard(model, plan)
            inputs = change_tensors(inputs, on_device)
            if name.startswith("STDiT3"):
                inputs.pop("mask", None)  # of which its own code makes sizes
            for key in case.differentiated:
                for tensor in tree_leaves(value_at(inputs, key)):
                    tensor.requires_grad_()
            for _ in range(2):
                with Synchronisations() as seen:
                    out = model(**inputs)
                    outputs = tree_leaves(out.to_tuple() if hasattr(out, "to_tuple") else out)
                    sum(each.float().sum() for each in outputs if isinstance(each, torch.Tensor)).backward()
        return sorted(set(seen.found))
    finally:
        parallel_states.reset(destroy_process_group=True)


if __name__ == "__main__":
    from opensora_accel import Plan

    logging.disable(logging.WARNING)  # what models warn of
    start()
    degrees, *names = sys.argv[1:]
    for name in names:
        print(
            json.dumps({"model": name, "waits": watch(name, Plan.from_dict(json.loads(degrees)))}), flush=True
        )
