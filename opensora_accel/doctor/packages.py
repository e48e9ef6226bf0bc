"""Installed packages that are missing, wrong, or do not fit one another; judged without importing them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from opensora_accel.doctor.finding import Finding, read_text, release

TRAIN_PACKAGES = {
    "diffusers": "0.42.1",
    "transformers": "5.0",
    "accelerate": "1.15",
    "safetensors": "",
    "tokenizers": "",
    "av": "14",
    "pillow": "",
    "psutil": "",
    "rich": "",
    "tyro": "1.0",
    "tensorboard": "",
    "torchdata": "0.11",
}
"""Distribution → least version. A test compares it with the `train` extra of setup.py."""

OPTIONAL_PACKAGES = {
    "flash-attn": ("flash_attn", "attention on CUDA"),
    "liger-kernel": ("liger_kernel", "fused norms"),
    "xformers": ("xformers", "attention on CUDA"),
    "quack-kernels": ("quack", "fused norms on Hopper and newer"),
    "torchcodec": ("torchcodec", "video decoding"),
    "wandb": ("wandb", "tracking"),
}


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def find_folder(module: str) -> Path | None:
    """Where a top-level package lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def found_version(distribution: str, module: str) -> str | None:
    return version_of(distribution) or ("of unknown version" if find_folder(module) else None)


def check_train_packages(versions: Mapping[str, str | None]) -> list[Finding]:
    missing = [name for name, version in versions.items() if version is None]
    old = [
        f"{name} {version} (needs {TRAIN_PACKAGES[name]})"
        for name, version in versions.items()
        if version is not None and release(version) < release(TRAIN_PACKAGES[name])
    ]
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings = [Finding("train packages", "ok", present)] if not missing and not old else []
    for what, names in (("missing", missing), ("too old", old)):
        if names:
            remedy = "pip install --upgrade 'opensora-accel[train]'"
            findings.append(Finding("train packages", "problem", f"{what}: {', '.join(names)}", remedy))
    return findings


@dataclasses.dataclass(frozen=True)
class Torchvision:
    version: str
    cuda: bool
    needs_torch: str
    """The releases of torch that its metadata asks for, as in "==2.5.1" or ">=2.14.0"; "" where it names none."""


def read_torchvision(folder: Path | None = None) -> Torchvision | None:
    """What torchvision was built for, by its files: importing it beside the wrong torch raises."""
    folder = folder or find_folder("torchvision")
    if folder is None:
        return None
    stated = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", read_text(folder / "version.py"))
    version = stated[1] if stated else version_of("torchvision") or "?"
    pin = next((r for r in requirements_of("torchvision") if re.match(r"torch\W", r)), "")
    needs = pin.split(";")[0].removeprefix("torch").strip(" ()")
    cuda = "+cu" in version or any(_mentions_cuda(path) for path in folder.glob("_C*.so"))
    return Torchvision(version, cuda, needs)


def _mentions_cuda(path: Path) -> bool:
    try:
        return b"libcudart" in path.read_bytes()
    except OSError:
        return False


def check_torchvision(found: Torchvision | None, torch_version: str, torch_cuda: str | None) -> Finding:
    if found is None:
        return Finding("torchvision", "ok", "not installed, and not needed")
    reason = ""
    if found.cuda and not torch_cuda:
        reason = f"is a CUDA build beside a CPU torch ({torch_version})"
    elif not _satisfies(torch_version, found.needs_torch):
        reason = f"needs torch{found.needs_torch}, and torch is {torch_version}"
    if reason:
        return Finding(
            "torchvision",
            "problem",
            f"torchvision {found.version} {reason}: importing it fails, and diffusers with it",
            "pip uninstall torchvision (nothing here needs it), or install the build that matches torch",
        )
    return Finding("torchvision", "ok", f"torchvision {found.version} fits torch {torch_version}")


def check_apex(folder: Path | None, has_cuda: bool, compare) -> Finding:
    """`compare()` gives the largest difference of apex's RMSNorm from torch's, or the reason why it cannot run."""
    if folder is None:
        return Finding("apex", "ok", "not installed; torch's own norms are used")
    if not (folder / "normalization").exists() or not (folder / "multi_tensor_apply").exists():
        return Finding(
            "apex",
            "problem",
            f"{folder} is not NVIDIA's apex: the package of that name on the package index is an unrelated web "
            "toolkit",
            "pip uninstall apex (torch's own norms are used), or build NVIDIA's apex from its source",
        )
    if not has_cuda:
        return Finding("apex", "note", "NVIDIA's apex, which works on CUDA only; torch's own norms are used")
    difference = compare()
    if isinstance(difference, float) and difference < 1e-5:
        return Finding("apex", "ok", f"NVIDIA's apex; FusedRMSNorm is within {difference:.1e} of torch's")
    failure = f"is {difference} off torch's" if isinstance(difference, float) else f"fails: {difference}"
    return Finding(
        "apex",
        "problem",
        f"NVIDIA's apex, but its FusedRMSNorm {failure}",
        "rebuild apex against this torch with its CUDA extensions, or pip uninstall apex",
    )


def compare_apex_norm() -> float | str:
    x = torch.randn(64, 256, device="cuda")
    try:
        from apex.normalization import FusedRMSNorm

        ours = torch.nn.functional.rms_norm(x, (256,), eps=1e-6)
        return float((FusedRMSNorm(256, eps=1e-6).cuda()(x) - ours).abs().max())
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def check_colossalai(
    version: str | None, requirements: Sequence[str], installed: Mapping[str, str | None] | None = None
) -> Finding:
    """Its pins against what is installed (`installed` is read from the metadata unless given)."""
    if version is None:
        return Finding("colossalai", "ok", "not installed, and not needed")
    broken = []
    for requirement in requirements:
        parsed = re.match(r"([A-Za-z0-9_.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?$", requirement)
        if parsed and parsed[2].strip() and "extra" not in (parsed[3] or ""):
            have = installed.get(parsed[1]) if installed is not None else version_of(parsed[1])
            if have is not None and not _satisfies(have, parsed[2]):
                broken.append(f"{parsed[1]}{parsed[2].strip()} (installed: {have})")
    if not broken:
        return Finding("colossalai", "ok", f"colossalai {version}, and its pins are kept")
    return Finding(
        "colossalai",
        "note",
        f"colossalai {version} pins {', '.join(broken)}. Launching, the Booster and TorchDDPPlugin work all the "
        "same; its jit-fused T5, ZeRO and Gemini do not or are untested",
        "use an environment of its own, or `pip install --no-deps colossalai==0.5.0` beside this torch; a plain "
        "`pip install colossalai` would replace torch and diffusers",
    )


def _satisfies(version: str, specifier: str) -> bool:
    """Whether a release keeps to `<=2.5.1,>=2.2`; clauses it cannot read count as kept."""
    for sign, bound in re.findall(r"(<=|>=|==|!=|<|>)\s*([0-9][0-9.]*)", specifier):
        have, want = release(version), release(bound)
        width = max(len(have), len(want))
        have, want = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        kept = {
            "<=": have <= want,
            ">=": have >= want,
            "==": have == want,
            "!=": have != want,
            "<": have < want,
            ">": have > want,
        }[sign]
        if not kept:
            return False
    return True


def check_optional(found: Mapping[str, str | None]) -> Finding:
    present = [f"{name} {version}" for name, version in found.items() if version]
    absent = [f"{name} ({OPTIONAL_PACKAGES[name][1]})" for name, version in found.items() if not version]
    parts = [f"found {', '.join(present)}"] if present else []
    parts += [f"not installed: {', '.join(absent)}"] if absent else []
    return Finding("optional packages", "ok" if present else "note", "; ".join(parts) + ". None is required")
