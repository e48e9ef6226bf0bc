"""What on this machine would stop or slow a training run, and what to do about it.

Every check has two halves: one reads facts from the machine, and a pure one turns facts into findings. Heavy or
broken packages are judged by their files and metadata, never imported.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import torch
import torch.distributed as dist

from opensora_accel.doctor import hardware, packages
from opensora_accel.doctor.finding import Finding, as_json, integer, print_report

__all__ = ["Finding", "as_json", "main", "print_report", "run_doctor"]


def run_doctor() -> list[Finding]:
    """All findings for this machine, in the order in which to read them. Takes a few seconds, changes nothing."""
    has_cuda = torch.cuda.is_available()
    return [
        hardware.check_torch(
            torch.__version__, torch.version.cuda, platform.python_version(), hardware.nvidia_driver_present()
        ),
        *hardware.check_gpus(hardware.read_gpus(), hardware.read_links()),
        *hardware.check_communication(
            dist.is_gloo_available(), dist.is_nccl_available(), has_cuda, hardware.try_gloo()
        ),
        hardware.check_threads(
            ranks=integer(os.environ.get("LOCAL_WORLD_SIZE"), 1),
            threads=torch.get_num_threads(),
            cores=hardware.usable_cores(),
            omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        ),
        *packages.check_train_packages({name: packages.version_of(name) for name in packages.TRAIN_PACKAGES}),
        packages.check_torchvision(packages.read_torchvision(), torch.__version__, torch.version.cuda),
        packages.check_apex(packages.find_folder("apex"), has_cuda, packages.compare_apex_norm),
        packages.check_colossalai(packages.version_of("colossalai"), packages.requirements_of("colossalai")),
        packages.check_optional(
            {
                name: packages.found_version(name, module)
                for name, (module, _) in packages.OPTIONAL_PACKAGES.items()
            }
        ),
        *hardware.check_resources(hardware.read_resources(), has_cuda),
    ]


def main(arguments: Sequence[str]) -> int:
    """`opensora-accel doctor`: the exit status is 1 where something would stop a run."""
    parser = argparse.ArgumentParser(
        prog="opensora-accel doctor", description="What on this machine would stop or slow a training run."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    findings = run_doctor()
    if options.json:
        print(as_json(findings))
        return int(any(finding.status == "problem" for finding in findings))
    return print_report(findings)
