"""Which kernels a block of each model family starts on a GPU, forward and backward, and what it keeps in between.

The same function looks at a block on tensors without values, as the planner does, and at one on a GPU.

    python -m tests.planner.block_operators        writes the table anew, block_operators.json, of sm_90
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.arguments import tensors_in
from opensora_accel.observe import CPU, FakeFloats, operators_of_cuda
from opensora_accel.observe.modes import OperatorMode
from opensora_accel.planner.models import MODELS
from opensora_accel.planner.operators import starts_kernel
from shardformer import blocks_of
from tests.video_models import CASES
from tests.video_models.case import Case, change_tensors

TABLE, ARCHITECTURE = Path(__file__).with_suffix(".json"), "sm_90"
# Cases whose models read numbers, which tensors without values have not.
READ_VALUES = (
    "HunyuanVideo 1.5",
    "HunyuanVideo 1.5, image",
    "Kandinsky 6, super-resolution",
    "STDiT3",
    "STDiT3, frames given",
    "STDiT3, one frame",
    "STDiT3 v1.3, frames given",
    "STDiT3 v1.3, images",
    "JoyImage-Edit, text positions",
)


def _published(name: str) -> Case:
    """A model at its true width, whose heads other kernels take than those of tiny ones; one block of each kind."""
    model = MODELS[name]
    layers = {"num_layers": 1} | ({"num_single_layers": 1} if name == "hunyuan-video" else {})
    clip = model.clip(2 * model.temporal + 1, 4 * model.spatial, 6 * model.spatial, 1, 8)

    def inputs() -> dict[str, Any]:
        return model.inputs(clip, build(), torch.float32)

    def build() -> nn.Module:
        return replace(model, arguments={**model.arguments, **layers}).build()

    return Case(build, inputs)


PUBLISHED = {name: _published(name) for name in ("wan2.1-14b", "hunyuan-video", "ltx-video", "cogvideox-5b")}
LOOKED_AT = CASES | PUBLISHED


class Kernels(OperatorMode):
    """Counts operators that start a kernel, with the dtype of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        numbers = [each for each in tensors_in((outputs, args)) if each.numel() and each.is_floating_point()]
        if starts_kernel(func) and numbers:
            dtype = str(numbers[0].dtype).removeprefix("torch.")
            self.counts[f"{func._schema.name.removeprefix('aten::')} {dtype}"] += 1


def kept_of(block: nn.Module, args: Any, kwargs: Any = None) -> dict[str, int]:
    """Bytes that a block's call adds to what autograd keeps, by the node that keeps them; parameters do not count."""
    known = {_address(each) for each in tensors_in((args, kwargs or {}))}
    known |= {_address(each) for each in (*block.parameters(), *block.buffers())}
    return _kept(block(*args, **(kwargs or {})), known)


def _kept(out: Any, known: set[int]) -> dict[str, int]:
    kept: Counter[str] = Counter()
    nodes = [each.grad_fn for each in tensors_in(out) if each.grad_fn is not None]
    # What attention keeps of its output, the product after it does too: the node that is reached last made it.
    seen, order = set(nodes), []
    while nodes:
        node = nodes.pop()
        order.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    # Products last, as what they keep is often another node's output.
    for node in sorted(order, key=lambda each: ("mm" in each.name().lower(), "Mul" in each.name())):
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in tensors_in(value):
                address = _address(tensor)
                if address not in known and tensor.is_floating_point():
                    known.add(address)
                    kept[node.name()] += tensor.untyped_storage().nbytes()
    return dict(kept)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def look_at(name: str, device: str) -> dict[str, dict[str, Any]]:
    """Of one case's model in bf16: by class of block, what one starts and keeps."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.bfloat16) if tensor.is_floating_point() else tensor.to(device)

    case = LOOKED_AT[name]
    model = case.make().to(device)
    # As diffusers loads it: some of its modules compute in fp32, and do not take bf16.
    wide = getattr(model, "_keep_in_fp32_modules", None) or ()
    for full_name, parameter in model.named_parameters():
        if not any(part in full_name.split(".") for part in wide):
            parameter.data = parameter.data.bfloat16()
    calls: dict[str, tuple[nn.Module, Any, Any]] = {}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(type(block).__name__, (block, args, kwargs))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks_of(model)]
    model(**change_tensors(case.inputs(), there))
    for hook in hooks:
        hook.remove()

    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    found = {}
    for kind, (block, args, kwargs) in calls.items():
        given = change_tensors((args, kwargs), fresh)
        known = {_address(each) for each in (*tensors_in(given), *block.parameters(), *block.buffers())}
        with Kernels() as forward:
            out = block(*given[0], **given[1])
        kept = _kept(out, known)
        outputs = [each for each in tensors_in(out) if each.requires_grad]
        gradients = [torch.empty_like(each) for each in outputs]
        with Kernels() as backward:
            torch.autograd.backward(outputs, gradients)
        found[kind] = {
            "forward": dict(sorted(forward.counts.items())),
            "backward": dict(sorted(backward.counts.items())),
            "kept": dict(sorted(kept.items())),
        }
    return found


def foreseen(name: str, architecture: str) -> dict[str, dict[str, Any]]:
    """The same on tensors without values, as the planner has them."""
    with FakeFloats(), nullcontext() if architecture == CPU else operators_of_cuda(architecture):
        return look_at(name, CPU)


def main() -> None:
    table: dict[str, Any] = {}
    kinds: set[str] = set()
    for name in LOOKED_AT:
        if name in READ_VALUES:
            continue
        found = foreseen(name, ARCHITECTURE)
        # Variants of a family have its blocks too.
        new = {kind: seen for kind, seen in found.items() if kind not in kinds or name in PUBLISHED}
        kinds |= set(new)
        table |= {name: new} if new else {}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
