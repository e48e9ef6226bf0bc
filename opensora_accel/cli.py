"""opensora-accel: train video diffusion transformers, sequence-parallel and proven exact.

commands:
  train     train a diffusers video transformer on a folder of clips
  shard     derive what a sharded einsum communicates, forward and backward
  verify    prove that a training step has the gradients of one device, whatever the mesh
  doctor    check this machine: torch, GPUs, backends, threads, packages
  bench     measure on this machine: offload, attention

`opensora-accel COMMAND --help` tells each command's options. On several ranks, start the same program with a
launcher: torchrun --nproc-per-node 2 -m opensora_accel.cli train --config FILE --plan.ulysses 2
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence


def _train(arguments: Sequence[str]) -> int:
    from opensora_accel.training.run import run

    return run(arguments)


def _shard(arguments: Sequence[str]) -> int:
    from opensora_accel.sharding.command import main as shard

    return shard(arguments)


def _verify(arguments: Sequence[str]) -> int:
    import tempfile
    from pathlib import Path

    from opensora_accel.verify.command import Proof
    from opensora_accel.verify.command import main as verify

    def proof_of_config(options: Sequence[str], folder: Path, max_ranks: int) -> Proof:
        from opensora_accel.training.proof import (
            TrainerStep,
            TrueSize,
            proof_meshes,
            tiny_config,
            write_clips,
        )
        from opensora_accel.training.run import parse

        config, _, _ = parse(options)
        tiny = tiny_config(config, write_clips(folder / "clips"))
        true = TrueSize.of(config)
        return Proof(
            step=TrainerStep(tiny),
            model_fn=None,
            meshes=proof_meshes(config.plan, max_ranks),
            reference="whole",
            preload=("diffusers.models.transformers", "opensora_accel.training.loop"),
            world=config.plan if config.plan.world_size > 1 else None,
            true_step=true.step,
            true_model_fn=true.model,
        )

    with tempfile.TemporaryDirectory(prefix="opensora-accel-") as folder:
        return verify(arguments, proof_of_config, Path(folder))


def _doctor(arguments: Sequence[str]) -> int:
    from opensora_accel.doctor import main as doctor

    return doctor(arguments)


def _bench(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_BENCH_HELP)
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}; the benchmarks are {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name](rest)


def _bench_offload(arguments: Sequence[str]) -> int:
    from opensora_accel.profiler.bench_offload import main as bench_offload

    return bench_offload(arguments)


def _bench_attention(arguments: Sequence[str]) -> int:
    from opensora_accel.profiler.bench_attention import main as bench_attention

    return bench_attention(arguments)


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "offload": _bench_offload,
    "attention": _bench_attention,
}

_BENCH_HELP = """\
opensora-accel bench NAME: measures on this machine, beside what others do, in one run.

  offload     activation checkpointing and offload, every mode: step time, memory, bytes moved, a picture
  attention   attention over ranks, ours beside yunchang, DeepSpeed, diffusers, torch: gradient errors, bytes, times

`opensora-accel bench NAME --help` tells its options."""

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "shard": _shard,
    "verify": _verify,
    "doctor": _doctor,
    "bench": _bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status. What a user can mend is said in one line, without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return _fail(f"there is no command {name!r}; {hint}The commands are {', '.join(COMMANDS)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return COMMANDS[name](rest)
    except (ValueError, OSError) as error:
        # For those whose message does not tell enough: OPENSORA_ACCEL_DEBUG=1 shows where it was raised.
        if os.environ.get("OPENSORA_ACCEL_DEBUG", "0") not in ("", "0"):
            raise
        return _fail(_in_words(error))
    except KeyboardInterrupt:
        saved = "; what was saved before is whole (--resume goes on from there)" if name == "train" else ""
        return _fail(f"interrupted{saved}", status=130)


def _in_words(error: ValueError | OSError) -> str:
    """The system's own errors by file and reason, without their number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _fail(message: str, status: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # The launcher ends the other ranks as soon as one has failed: mostly only rank 0 says what all would say.
        time.sleep(2)
    print(f"error{'' if rank == '0' else f' (rank {rank})'}: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
