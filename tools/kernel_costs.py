"""What the Triton kernels cost on GPUs that are not here: each is compiled for them, and its machine code is counted.

    python tools/kernel_costs.py                 # a table of all kernels for an A100, an H100 and a B200
    python tools/kernel_costs.py --only H100

Triton brings NVIDIA's assembler and disassembler with it. From the code of a kernel, or of the loop in it, and from
what it moves, three times of a tile follow:

    memory    its bytes, at what a copy gets of the GPU's memory
    pipes     its instructions: four schedulers of a multiprocessor each start one a clock for 32 threads; integer
              operations take two clocks of their pipe, loads and stores four, conversions one by one eight
    latency   the way to memory and back, and the barriers, by how many programs a multiprocessor has registers for

A tile takes the longest of them where the others are short, and longer where two are alike: the fourth root of the sum
of their fourth powers, which says 84 % where pipes are as busy as memory and 98 % where they are half as busy. The
share is that of memory in it: 100 % is the speed of a copy.

It is a forecast, to compare kernels by. The way to memory is fitted to 6 kernels on an H100 under Nsight (2026-11-26,
32,768 tokens × 3,072). Their shares, 99 and 91 % (RMS norm, forward and backward), 87 and 90 % (adaLN), 92 and 76 %
(RMS norm and rotary embedding), come out to 2 % but for the last two, which loaded behind a barrier what no other row
shares, and so went that way twice. No kernel here does so any more. Timed since then with all that a call starts, over
3,072 and 5,120 features (tools/results/norms_h100.json), they take 93 to 100 % of a copy forward and 89 to 94 % with
backward, where the forecasts are 96 to 100 % and 90 to 97 %.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from shardformer.modeling.kernels.gate import GatedResidual
from shardformer.modeling.kernels.norm import ModulatedNorm
from shardformer.modeling.kernels.rotary import NormRotary
from shardformer.modeling.norm_orders import ORDERS

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RMS, LAYER = ORDERS[2], ORDERS[5]


@dataclass(frozen=True)
class Gpu:
    name: str
    # As Triton calls it: 90 for sm_90.
    arch: int
    num_multiprocessors: int
    clock_hz: float
    # Measured on an H100; for the others nine tenths of what the maker states, which is what copies get elsewhere.
    copy_bytes_per_s: float
    max_warps: int = 64

    @property
    def bytes_per_clock(self) -> float:
        """Of one multiprocessor's share."""
        return self.copy_bytes_per_s / self.num_multiprocessors / self.clock_hz


# By the makers' data sheets (SXM boards, boost clock).
GPUS = (
    Gpu("A100", 80, 108, 1.41e9, 0.9 * 2.04e12),
    Gpu("H100", 90, 132, 1.755e9, 3.1e12),
    Gpu("B200", 100, 148, 1.965e9, 0.9 * 8.0e12),
)
_REGISTERS, _SHARED_BYTES, _SCHEDULERS = 65536, 160 * 1024, 4
# Clocks: of a program to a loaded memory and back, its own start and end included, and for its threads to meet.
_MEMORY_CLOCKS, _BARRIER_CLOCKS = 3400, 30
# How sharply the longest of the three stands out.
_SHARPNESS = 4
# Clocks that a scheduler's pipe is taken by one instruction of a warp, by the first words of its name.
_PIPES = {
    "fma": (1, ("FADD", "FMUL", "FFMA", "IMAD", "HFMA2", "HADD2", "HMUL2")),
    "integer": (
        2,
        (
            "IADD",
            "LOP",
            "SHF",
            "PRMT",
            "ISETP",
            "FSETP",
            "FSEL",
            "SEL",
            "LEA",
            "F2FP",
            "MOV",
            "FMNMX",
            "PLOP",
        ),
    ),
    "special": (8, ("MUFU", "F2F", "I2F", "F2I", "I2I")),
    "memory": (4, ("LDG", "STG", "LDS", "STS", "SHFL", "LDC", "LDL", "STL")),
}


@dataclass(frozen=True)
class Case:
    """One kernel at a shape that models have."""

    name: str
    num_features: int
    run: Callable[[int], torch.Tensor]
    # Of bf16 that are read and written for each value.
    forward_tensors: int = 2
    backward_tensors: int = 3
    # Bytes that are read beside them for each value.
    table_bytes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What one launch was compiled to."""

    case: str
    num_features: int
    direction: str
    gpu: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    # Of a multiprocessor.
    programs: int
    instructions_per_byte: float
    share: float


_TOKENS = 37_440


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Without values, and with no page touched."""
    return torch.empty(shape, dtype=dtype).requires_grad_()


def _rms(num_features: int) -> torch.Tensor:
    x, weight = _tensor(1, _TOKENS, num_features), _tensor(num_features)
    return ModulatedNorm.apply(x, None, None, weight, None, RMS, 1e-6, "each")


def _ada_ln(num_features: int) -> torch.Tensor:
    """As in Wan: fp32 scale and shift of each sample, rounded once."""
    scale, shift = (_tensor(1, 1, num_features, dtype=torch.float32) for _ in range(2))
    return ModulatedNorm.apply(
        _tensor(1, _TOKENS, num_features), scale, shift, None, None, LAYER, 1e-6, "end"
    )


def _gate(num_features: int) -> torch.Tensor:
    x, y = (_tensor(1, _TOKENS, num_features) for _ in range(2))
    return GatedResidual.apply(x, y, _tensor(1, 1, num_features, dtype=torch.float32), "end")


def _rotary(pairs: str) -> Callable[[int], torch.Tensor]:
    """Behind a norm over all heads, as in Wan; with 128 features over one head, as in HunyuanVideo."""

    def run(num_features: int) -> torch.Tensor:
        lead = (1, _TOKENS) if num_features > 128 else (1, _TOKENS, 24)
        table = torch.empty(1, _TOKENS, *[1] * (len(lead) - 1), 128)
        x, weight = _tensor(*lead, num_features), _tensor(num_features)
        return NormRotary.apply(x, table, table, weight, None, RMS, 1e-6, pairs, "end")

    return run


CASES = [
    *(Case("RMS norm", size, _rms) for size in (3072, 4096, 5120, 6144)),
    *(Case("adaLN", size, _ada_ln) for size in (3072, 4096, 5120, 6144)),
    *(Case("gated residual", size, _gate, 3, 3) for size in (3072, 5120)),
    # Two tables in fp32 for each token, which its heads share.
    *(
        Case(name, size, _rotary(pairs), table_bytes=2 * 4 * 128 / (24 * 128 if size == 128 else size))
        for name, pairs in (("RMS norm, rotary", "neighbours"), ("RMS norm, rotary of halves", "halves"))
        for size in (128, 3072, 5120)
    ),
]


class _Driver:
    """Names a GPU to Triton, and has none."""

    def __init__(self, arch: int):
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compiled_for(arch: int) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """Within it kernels are compiled and not run; the options and the binary of each launch."""
    triton.runtime.driver.set_active(_Driver(arch))
    launches: list[tuple[dict[str, Any], Any]] = []
    run = JITFunction.run

    def compiles(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        binary = run(kernel, *args, **{**kwargs, "warmup": True})
        launches.append((kwargs, binary))
        return binary

    JITFunction.run = compiles
    try:
        yield launches
    finally:
        JITFunction.run = run


def costs(case: Case, gpu: Gpu) -> list[Cost]:
    """Of a case's forward and backward."""
    with compiled_for(gpu.arch) as launches:
        out = case.run(case.num_features)
        out.backward(out)
    directions = (("forward", case.forward_tensors), ("backward", case.backward_tensors))
    return [
        _cost(case, gpu, direction, 2 * num_tensors + case.table_bytes, *launch)
        # What sums the programs' partial gradients is a third launch, of a hundredth of the bytes.
        for (direction, num_tensors), launch in zip(directions, launches[:2], strict=True)
    ]


def _cost(
    case: Case, gpu: Gpu, direction: str, bytes_per_value: float, options: dict[str, Any], binary: Any
) -> Cost:
    usage, instructions = disassembled(binary)
    threads, num_warps = 32 * options["num_warps"], options["num_warps"]
    values = options["TILE"] * options["C"]
    # Registers are given to warps in pieces of 256.
    of_warp = -(-32 * usage["REG"] // 256) * 256
    programs = max(1, min(
        _REGISTERS // (of_warp * num_warps),
        gpu.max_warps // num_warps,
        _SHARED_BYTES // max(1, usage["SHARED"]),
    ))  # fmt: skip
    issued, barriers = _clocks(instructions)
    memory = values * bytes_per_value / gpu.bytes_per_clock
    pipes = issued * num_warps / _SCHEDULERS
    # Of a program by itself. Where it loads ahead of its loop's turn, the way to memory is beside the rest.
    alone = pipes + barriers * _BARRIER_CLOCKS
    alone = max(alone, _MEMORY_CLOCKS) if direction == "backward" else alone + _MEMORY_CLOCKS
    took = sum(clocks**_SHARPNESS for clocks in (memory, pipes, alone / programs)) ** (1 / _SHARPNESS)
    return Cost(
        case.name,
        case.num_features,
        direction,
        gpu.name,
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        usage["SHARED"],
        programs,
        len(instructions) * threads / (values * bytes_per_value),
        memory / took,
    )


def disassembled(binary: Any) -> tuple[Counter[str], list[str]]:
    """What a kernel uses, by name, and the instructions of its loop, or of all of it where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(binary.asm["cubin"])
        usage = _output("cuobjdump", "-res-usage", file)
        code = _output("nvdisasm", "-c", file)
    used = Counter({name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", usage)})
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loop = slice(0, None)
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;", line):
            instructions.append(instruction[1])
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            begin = labels.get(target[1]) if target else None
            # A branch back; the last instruction branches to itself.
            if begin is not None and begin < len(instructions) - 1 and loop.stop is None:
                loop = slice(begin, len(instructions))
    return used, [each for each in instructions[loop] if not each.startswith("NOP")]


def _output(tool: str, *args: Any) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def _clocks(instructions: list[str]) -> tuple[float, int]:
    """Clocks of a scheduler for one warp, by its busiest pipe, and the barriers."""
    pipes: Counter[str] = Counter()
    for each in instructions:
        pipe = next((pipe for pipe, (_, names) in _PIPES.items() if each.startswith(names)), "other")
        pipes[pipe] += 1
    busiest = max((clocks * pipes[pipe] for pipe, (clocks, _) in _PIPES.items()), default=0)
    barriers = sum(each.startswith("BAR") for each in instructions)
    return max(len(instructions), busiest), barriers


def table(found: list[Cost]) -> str:
    """In Markdown."""
    lines = [
        "| kernel | C | | GPU | registers | spilled | programs | instructions a byte | share of a copy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        lines.append(
            f"| {each.case} | {each.num_features} | {each.direction} | {each.gpu} | {each.registers} | "
            f"{each.spilled_bytes} | {each.programs} | {each.instructions_per_byte:.1f} | {each.share:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[gpu.name for gpu in GPUS], help="for this GPU alone")
    arguments = parser.parse_args()
    gpus = [gpu for gpu in GPUS if arguments.only in (None, gpu.name)]
    print(table([cost for case in CASES for gpu in gpus for cost in costs(case, gpu)]))


if __name__ == "__main__":
    main()
