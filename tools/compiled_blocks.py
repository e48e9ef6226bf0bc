"""What torch.compile makes of a transformer block for a GPU that is not here: bytes of its kernels, and of eager torch.

    python tools/compiled_blocks.py                                 # a table of the blocks below, for an H100
    python tools/compiled_blocks.py --only wan2.1-14b --code DIR    # one model, and the code that Inductor wrote

Norms, modulations, gates, rotary embeddings and activations compute little and move much. Of Wan's norm with scale and
shift, eager PyTorch makes a copy in fp32, a norm, a product, a sum and a copy in bf16; one kernel reads the input and
writes the output, 2 units, where a unit is the block's input once read or written. Counted are all kernels of forward
and backward that are neither a matrix product nor attention.

A block is traced on tensors without values, at a real model's sizes. torch.compile traces and cuts it as for the CPU;
then its tensors are said to lie on a GPU, and Inductor writes Triton for it, which is compiled to machine code: values
that do not fit into registers are spilled to memory, and are counted too. What Inductor would choose by timing, among
settings of a kernel, is not known here: the setting that spills least is taken. A kernel that goes over its input twice
is counted once, as the second time finds it in a cache: one row of 5,120 is 10 KB.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.scheduler
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    record_original_output_strides,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

import shardformer
from opensora_accel.arguments import tensors_in
from opensora_accel.observe.modes import OperatorMode
from opensora_accel.planner.models import MODELS
from opensora_accel.planner.operators import kernel_of, reads_and_writes, starts_kernel
from tools.kernel_costs import GPUS, compiled_for, disassembled

H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
_CUDA = torch.device("cuda", 0)
_BF16 = torch.bfloat16
# What torch asks of a GPU before it writes code for it.
_PROPERTIES = SimpleNamespace(
    name=H100.name,
    major=H100.arch // 10,
    minor=H100.arch % 10,
    multi_processor_count=H100.num_multiprocessors,
    max_threads_per_multi_processor=32 * H100.max_warps,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    warp_size=32,
    max_threads_per_block=1024,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


# ---- models


@dataclass(frozen=True)
class Model:
    """A published model with one block of each kind, and what its forward is given."""

    class_name: str
    arguments: Mapping[str, Any]
    inputs: Callable[[nn.Module], Mapping[str, Any]]

    def build(self) -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, self.class_name)(**self.arguments)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_BF16)
        return model


def _published(name: str, frames: int, height: int, width: int, **arguments: int) -> Model:
    """One of those that the planner knows, at a clip of its size."""
    model = MODELS[name]
    clip = model.clip(frames, height, width, 1, model.text_tokens)
    return Model(
        model.class_name,
        {**model.arguments, "num_layers": 1, **arguments},
        lambda built: model.inputs(clip, built, _BF16),
    )


def _ltx2(_model: nn.Module) -> dict[str, Any]:
    """16 × 16 × 24 tokens of video, 126 of audio."""
    return {
        "hidden_states": torch.randn(1, 6144, 128, dtype=_BF16),
        "audio_hidden_states": torch.randn(1, 126, 128, dtype=_BF16),
        "encoder_hidden_states": torch.randn(1, 1024, 3840, dtype=_BF16),
        "audio_encoder_hidden_states": torch.randn(1, 1024, 3840, dtype=_BF16),
        "timestep": torch.full((1,), 500.0),
        "num_frames": 16,
        "height": 16,
        "width": 24,
        "audio_num_frames": 126,
        "return_dict": False,
    }


def _minimax_h3(_model: nn.Module) -> dict[str, Any]:
    """One packed sequence: 512 tokens of text, 16 × 30 × 52 of video, 512 of audio."""
    sizes = text, video, audio = 512, 16 * 30 * 52, 512
    rows = torch.arange(sum(sizes))
    return {
        "hidden_states": torch.randn(1, video, 96, dtype=_BF16),
        "audio_hidden_states": torch.randn(1, audio, 32, dtype=_BF16),
        "encoder_hidden_states": torch.randn(1, text, 5120, dtype=_BF16),
        "timestep": torch.full((1,), 0.5),
        "timestep_indices": torch.zeros_like(rows),
        "token_tags": torch.cat([torch.full((size,), tag) for tag, size in enumerate(sizes)]),
        "position_ids": torch.randn(len(rows), 3),
        "video_indices": rows[text : text + video],
        "audio_indices": rows[text + video :],
        "text_indices": rows[:text],
        "return_dict": False,
    }


BLOCKS = {
    "wan2.1-14b": _published("wan2.1-14b", 49, 480, 832),
    "hunyuan-video": _published("hunyuan-video", 49, 480, 832, num_single_layers=1, num_refiner_layers=1),
    "ltx-video": _published("ltx-video", 121, 512, 768),
    "ltx-2": Model("LTX2VideoTransformer3DModel", {"num_layers": 1}, _ltx2),
    "cogvideox-5b": _published("cogvideox-5b", 49, 480, 720),
    "minimax-h3": Model(
        "MiniMaxH3Transformer3DModel", {"num_layers": 1, "num_refiner_layers": 1}, _minimax_h3
    ),
}


# ---- a block by itself


@torch.library.custom_op("compiled_blocks::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that nothing is fused with. [B, H, S, D], laid out as [B, S, H, D]."""
    raise NotImplementedError("it has shapes alone")


@torch.library.custom_op("compiled_blocks::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("it has shapes alone")


_attention.register_fake(
    lambda query, key, value: query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
)
_attention_backward.register_fake(
    lambda grad, query, key, value: tuple(torch.empty_like(each) for each in (query, key, value))
)
_attention.register_autograd(
    lambda context, grad: _attention_backward(grad, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def _operators_of_a_gpu() -> Iterator[None]:
    """What torch does in one kernel on a GPU, and in several on a CPU."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _attention(query, key, value)

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]

    with (
        mock.patch.object(nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(nn.functional, "rms_norm", rms_norm),
    ):
        yield


@dataclass(frozen=True)
class Call:
    """A block and what the model gives it."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def step(self, forward_is_done: Callable[[], None] = lambda: None) -> None:
        """Its forward and backward."""
        args, kwargs = tree_map_only(
            Tensor,
            lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
            (self.args, self.kwargs),
        )
        outputs = tensors_in(self.block(*args, **kwargs))
        forward_is_done()
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def _calls(model: Model) -> list[Call]:
    """One of each kind of block."""
    built, calls = model.build(), dict[type, Call]()
    for block in shardformer.blocks_of(built):
        block.register_forward_pre_hook(
            lambda block, args, kwargs: calls.setdefault(type(block), Call(block, args, kwargs)) and None,
            with_kwargs=True,
        )
    built(**model.inputs(built))
    for block in shardformer.blocks_of(built):
        block._forward_pre_hooks.clear()
    return list(calls.values())


# ---- eager


class _Traffic(OperatorMode):
    """Bytes that operators move, but for products and attention, by direction."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()
        self.direction = "forward"

    def turn(self) -> None:
        self.direction = "backward"

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if func.namespace != "aten" or not starts_kernel(func):
            return
        kernel = kernel_of(func, args, kwargs, outputs, *reads_and_writes(func, args, kwargs, outputs))
        if kernel.kind == "memory":
            self.num_bytes[self.direction] += kernel.num_bytes


# ---- compiled


@dataclass
class Compiled:
    """What Inductor wrote for the graphs of one block, by direction."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    num_kernels: Counter[str] = field(default_factory=Counter)
    spilled_bytes: Counter[str] = field(default_factory=Counter)
    # By name.
    code: dict[str, str] = field(default_factory=dict)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """In place of Inductor's own `compile_fx_inner`: the graph runs as it is, and its code is kept."""
        direction = "backward" if options.get("is_backward") else "forward"
        on_cpu = make_boxed_func(graph.forward)
        graph = copy.deepcopy(graph)
        view_to_reshape(graph)
        record_original_output_strides(graph)
        mode = detect_fake_mode(inputs)
        with V.set_fake_mode(mode):
            _recursive_post_grad_passes(graph, is_inference=False)
        inputs = _to_gpu(graph, inputs, mode)
        lowered = GraphLowering(graph, example_inputs=inputs, is_backward=direction == "backward")
        with (
            _pretended_gpu(),
            V.set_debug_handler(DebugContext()),
            V.set_fake_mode(mode),
            V.set_graph_handler(lowered),
        ):
            lowered.run(*inputs)
            code = lowered.codegen()[0].value
            for node in lowered.scheduler.nodes:
                if not node.is_extern():
                    self.num_bytes[direction] += node.get_read_write_buffers_sizes()
        self.code[f"{direction}_{len(self.code)}"] = code
        with unset_fake_temporarily(), _pretended_gpu():
            for kernel in _kernels(code):
                self.num_kernels[direction] += 1
                self.spilled_bytes[direction] += _spilled_bytes(kernel)
        return on_cpu


def _to_gpu(graph: torch.fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> list[Any]:
    """Says of all tensors of a graph that they lie on a GPU. Returns such inputs."""

    def moved(tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            shapes = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return FakeTensor(mode, shapes, _CUDA)

    for node in graph.graph.nodes:
        node.meta["val"] = tree_map_only(Tensor, moved, node.meta.get("val"))
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _CUDA}
    return [moved(each) if isinstance(each, Tensor) else each for each in inputs]


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Within it torch and Triton find a GPU. Nothing can be run on it."""
    found: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_properties": lambda _device=None: _PROPERTIES,
    }
    capability = {"get_device_capability": lambda _device=None: (_PROPERTIES.major, _PROPERTIES.minor)}
    worker = {name: found[name] for name in ("current_device", "get_device_properties")}
    compute = {"get_compute_capability": lambda _device=None: H100.arch}
    with ExitStack() as patches, compiled_for(H100.arch):
        for target, functions in (
            (torch.cuda, found | capability),
            (CudaInterface, found | compute),
            (CudaInterface.Worker, worker),
            (torch._inductor.scheduler, {"has_triton": lambda *_: True}),
            # A build for CPUs has none.
            (torch._C, {"_cuda_getCurrentRawStream": lambda _device: 0}),
            # `compiled_for` has set the driver.
            (triton_helpers, {"set_driver_to_gpu": lambda: None}),
        ):
            for name, function in functions.items():
                method = staticmethod(function) if isinstance(target, type) else function
                patches.enter_context(mock.patch.object(target, name, method, create=True))
        # Launched by Triton, whose kernels have their machine code with them.
        patches.enter_context(config.patch(compile_threads=1, use_static_cuda_launcher=False))
        yield


def _kernels(code: str) -> list[CachingAutotuner]:
    """The Triton kernels of what Inductor wrote, compiled in all their settings."""
    kernels: list[CachingAutotuner] = []
    precompile = CachingAutotuner.precompile

    def compiles(kernel: CachingAutotuner, *_: Any, **__: Any) -> None:
        precompile(kernel, warm_cache_only=True)
        kernels.append(kernel)

    with mock.patch.object(CachingAutotuner, "precompile", compiles):
        PyCodeCache.load(code)
    return kernels


def _spilled_bytes(kernel: CachingAutotuner) -> int:
    """In the setting that spills least."""
    usages = (disassembled(each.kernel)[0] for each in kernel.compile_results)
    return min(usage["STACK"] + usage["LOCAL"] for usage in usages)


# ---- both


@dataclass(frozen=True)
class Row:
    """One block in one direction."""

    model: str
    block: str
    direction: str
    # The block's input, read or written once.
    unit_bytes: int
    eager_bytes: int
    compiled_bytes: int
    num_kernels: int
    spilled_bytes: int
    code: Mapping[str, str]

    @property
    def eager(self) -> float:
        return self.eager_bytes / self.unit_bytes

    @property
    def compiled(self) -> float:
        return self.compiled_bytes / self.unit_bytes


def rows(name: str) -> list[Row]:
    """Of each kind of block that a model has, forward and backward."""
    found = []
    with _operators_of_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
        for call in _calls(BLOCKS[name]):
            with _Traffic() as eager:
                call.step(eager.turn)
            torch._dynamo.reset()
            compiled = Compiled()
            call.block.compile(backend=partial(compile_fx, inner_compile=compiled.backend))
            call.step()
            hidden = tensors_in((call.args, call.kwargs))[0]
            for direction in ("forward", "backward"):
                found.append(
                    Row(
                        name,
                        type(call.block).__name__,
                        direction,
                        hidden.nbytes,
                        eager.num_bytes[direction],
                        compiled.num_bytes[direction],
                        compiled.num_kernels[direction],
                        compiled.spilled_bytes[direction],
                        {key: code for key, code in compiled.code.items() if key.startswith(direction)},
                    )
                )
    return found


def table(found: list[Row]) -> str:
    """In Markdown."""
    lines = [
        "| model | block | | eager | compiled | kernels | spilled |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        lines.append(
            f"| {row.model} | {row.block} | {row.direction} | {row.eager:.1f} | {row.compiled:.1f} | "
            f"{row.num_kernels} | {row.spilled_bytes} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=BLOCKS, help="this model alone")
    parser.add_argument("--code", type=Path, help="a folder for the code that Inductor wrote")
    arguments = parser.parse_args()
    found = [row for name in BLOCKS if arguments.only in (None, name) for row in rows(name)]
    if arguments.code is not None:
        arguments.code.mkdir(parents=True, exist_ok=True)
        for row in found:
            for key, code in row.code.items():
                (arguments.code / f"{row.model}_{row.block}_{key}.py").write_text(code)
    print(table(found))


if __name__ == "__main__":
    main()
