"""The stages of `first_gpu.py`: what runs on a GPU, for how long at most, and which claims it decides.

What is right comes before what is fast: where the time is short, the last stages do not start. The limits of those for
one GPU fit 13 minutes, of which a run takes 10, and so do those for several. `docs/gpu.md` has a line for each stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stage:
    """One process, and what it is to show."""

    name: str
    # A script and its options, or "pytest" and its own; {out} is the folder of the report.
    command: str
    # By claim: a pattern of the checks, tests or a benchmark's own claims, that it is made of.
    claims: Mapping[str, str]
    limit_s: float = 60.0
    # On a dry run, in place of the command; None runs the same.
    dry: str | None = None
    gpus: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def result(self) -> str:
        """The name of its JSON."""
        return f"{self.name}.json"


def bench(script: str, on_gpu: str, dry: str = "", picture: bool = False) -> dict[str, Any]:
    """The commands of a benchmark: on a GPU, and small on the CPU."""
    path = f"tools/bench/{script}.py --output {{out}}/{script}.json"
    path += f" --picture {{out}}/{script}.png" if picture else ""
    return {
        "name": script,
        "command": f"{path} --device cuda {on_gpu}",
        "dry": f"{path} --device cpu --quick {dry}",
    }


def node(name: str, tests: str, limit_s: float, claims: Mapping[str, str]) -> Stage:
    """Tests of ranks with a GPU each, by parts of their names; on a dry run over gloo."""
    command = "pytest {} tests/test_node.py -k '{}({})'"
    dry = command.format("-m prove", "cpu and ", tests)
    return Stage(name, command.format("", "cuda and ", tests), claims, limit_s, dry, gpus=2)


# One norm that is swapped, and every kernel.
_NORMS = "'^(T5LayerNorm|RMS norm|norm|gate)'"

STAGES = (
    Stage("machine", "tools/machine.py {out}/machine.json", gpus=0, limit_s=30, claims={
        "torch reaches the GPU: a product on it is that of the CPU": "a product",
        "attention takes a fused kernel in bf16: plain, masked and deterministic": "fused kernel",
        "torch prefers the kernel that ring attention takes": "prefers",
    }),
    Stage("attention-tests", "pytest -n 4 tests/attention/test_kernels.py", limit_s=32, claims={
        "each attention kernel of torch and flash-attn takes blocks of keys as the definition has them": "add_up",
        "kernels take the log-sum-exp of some rows, as zigzag and striped rings give it": "on_one_device",
    }),
    Stage("offload-tests", "pytest tests/offload/test_cuda.py -k 'not sanitizer'", limit_s=20, claims={
        "offload on CUDA streams changes no bit, also with slow copies": "slow_copies",
        "the arena's slabs are page-locked": "page_locked",
        "copies have streams of their own": "streams",
    }),
    Stage("kernel-tests", "pytest -n 14 --dist worksteal -m 'cuda and not prove' "
          "tests/shardformer/modeling/triton/values.py tests/experiments/unpacking.py",
          limit_s=78, claims={
        "Triton kernels compiled for the GPU agree with plain operations, values and gradients": ".",
    }),
    Stage("checkpoint-tests", "pytest -n 8 tests/checkpoint", limit_s=40, claims={
        "checkpointing in every mode has the gradients of none on CUDA, bit for bit": "checkpoint",
    }),
    Stage("model-tests", "pytest -n 14 --maxschedchunk=1 tests/shardformer/test_cuda.py "
          "tests/planner/test_block_operators.py", limit_s=115, claims={
        "a block of every family starts the kernels, and keeps the bytes, that the planner counts": "foreseen",
        "every model of the tests, checkpointed and offloaded on a GPU, has the plain model's gradients": "in_fp64",
        "models whose norms were swapped have them too": "norms",
        "blocks that Inductor compiled for the GPU have those of the plain model's that it compiled": "compiled",
    }),
    Stage("trainer-tests",
          "pytest -n 6 tests/training/test_cuda.py tests/training/test_save.py tests/profiler/test_cuda.py "
          "-k 'not family'",
          limit_s=50, claims={
        "the trainer has the same losses under every plan of one rank over NCCL, and goes on from what it saved":
            "same_losses|goes_on",
        "a step is profiled over NCCL, with times that are known": "profile",
        "saved states are copied on a stream of their own, beside the next step": "late_copy",
    }),
    Stage("family-tests",
          "pytest -n 14 --maxschedchunk=1 tests/training/test_cuda.py tests/training/test_recipes.py "
          "tests/training/test_minimax_h3.py -k 'family or on_a_gpu'", limit_s=52, claims={
        "every family that has a recipe learns what it learns on a CPU, and makes samples": "family",
        "clips, captions, frames that are given and sound are encoded, learned and decoded as on the host": "on_a_gpu",
    }),
    Stage("pieces-tests", "pytest -n 4 tests/attention/test_pieces_cuda.py", limit_s=35, claims={
        "one call for all that is seen of a block of keys is as exact as a call for each tile": "as_exact",
        "where one call and a call for each tile can be had, the quicker one is chosen": "quicker",
    }),
    Stage("sanitizer", "pytest -n 2 tests/offload/test_cuda.py -k sanitizer", limit_s=43, claims={
        "torch's CUDA sanitizer finds no race in the offload engine": "sanitizer",
    }),
    Stage(**bench("blockwise", "--rounds 5 --simulate 3"), limit_s=30, claims={
        "rings of 2 to 8 simulated ranks are as near to fp64 as one call, with every kernel": "over one call's: ring",
        "Ulysses of 2 to 8 simulated ranks is as near to fp64 as one call": "over one call's: Ulysses",
        "the kernel that is chosen is within 5 % of the fastest": "chosen kernel over the fastest",
    }),
    Stage(**bench("norms", f"--rounds 5 --only {_NORMS}", f"--only {_NORMS}"), limit_s=90, claims={
        "swapped norms are no slower than before": "original over swapped",
        "swapped norms run at 85 % of a copy's bandwidth or more": "^forward: share of a copy",
        "Triton kernels run at 90 % of a copy's bandwidth or more, at 85 % where they modulate or turn": "^kernels",
    }),
    Stage(**bench("compressed", "--only unpack --rounds 5", "--only unpack"), limit_s=11, claims={
        "weights in int8 and fp8 are unpacked at 85 % of a copy's bandwidth or more": "share of a copy",
        "the kernel unpacks them in less time than torch's operations": "over the kernel",
    }),
    Stage(**bench("trainer_step", "--rounds 15"), limit_s=50, claims={
        "a step of the trainer takes at most 1.02 × that of a plain loop": "a step of the trainer",
    }),
    Stage(**bench("offload", "--hidden 3072 --tokens 12000 --blocks 4 --rounds 3", picture=True), limit_s=34, claims={
        "every way to offload has the gradients of checkpointing alone, bit for bit": "gradients",
        "offload takes at most 1.02 × the step of checkpointing alone": "step time of full.offload",
        "at least 95 % of the copies' time lies beside compute": "hides behind compute",
        "offload moves and keeps the bytes of theory": "bytes that",
        "offload is faster than other offloaders": "step time of (?!full)",
        "offload has a lower peak than other offloaders": "peak of",
    }),
    Stage(**bench("longest", "--memory-gib 8 --start 256 --seconds 40", picture=True), limit_s=60, claims={
        "checkpointing trains on longer sequences than none": "of (full|selective) over that of none",
        "offload trains on longer sequences than checkpointing alone": "longest sequence of full.offload",
        "a step of Wan blocks with offload takes at most 1.02 × that without": "step time of full.offload",
        "a step with offload asks for no synchronisation": "wait for the device",
    }),
    node("node-tests", "spread or sharded or average", 180, {
        "rings, Ulysses and tensor parallelism over NCCL have the gradients of one device": "spread",
        "FSDP2 over NCCL trains as one device does, with shards on the host too": "sharded",
        "an average over copies, rounded by a hook, is whole while it is sent (4 GPUs)": "average",
    }),
    node("node-trainer-tests", "trainer or profiler", 60, {
        "the trainer learns over NCCL what one rank learns": "trainer",
        "the profiler says over NCCL which rank waited, and that an exchange beside compute costs nothing": "profiler",
    }),
    node("kill-tests", "killed", 120, {
        "when a rank is killed the others end by themselves, and the run goes on from what was saved": "killed",
    }),
    Stage(**bench("collectives", "--ranks 2 --rounds 5", "--rounds 2"), gpus=2, claims={
        "all-to-all over NCCL is faster than list, dist.all_to_all and cat": ".",
    }),
    Stage(**bench("attention", "--ranks 2 --rounds 3", "--ranks 2 --only ours", picture=True), limit_s=90, gpus=2,
          claims={
        "parallel attention over NCCL is right, and as fast as its peers": ".",
    }),
)  # fmt: skip
