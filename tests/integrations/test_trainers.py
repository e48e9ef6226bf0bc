"""The patches of docs/integrations for other people's trainers, and the policy that one of them comes with.

The trainers' code is not here. With OPENSORA_ACCEL_TRAINERS, a folder of their checkouts by the names of their
repositories, `make prove` sees that each patch applies to its trainer, and that the patched trainer, run by its program
of tests/integrations/trainers, takes the steps that the trainer takes on one process.
"""

import functools
import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.precision import LiftOperations
from tests.authors_models.diffsynth import WanTrainingModule
from tests.authors_models.wan import TEXT
from tests.integrations import trainers
from tests.integrations.pages import ROOT, programs
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE, relative_errors

CHECKOUTS = os.environ.get("OPENSORA_ACCEL_TRAINERS")
REPOSITORIES = {
    "diffsynth_studio.md": "DiffSynth-Studio",
    "diffsynth_h3.md": "DiffSynth-Studio",
    "videox_fun.md": "VideoX-Fun",
    "diffusers_examples.md": "diffusers",
    "simpletuner.md": "SimpleTuner",
    "nemo_automodel.md": "Automodel",
    "fastvideo.md": "FastVideo",
    "verl_omni.md": "verl-omni",
}
# Where each page's new file lies in the checkout.
POLICY_FILES = {
    "diffsynth_studio.md": "examples/wanvideo/model_training/diffsynth_policy.py",
    "diffsynth_h3.md": "examples/minimax_h3/model_training/diffsynth_policy.py",
    "simpletuner.md": "simpletuner/helpers/training/sequence_policies.py",
    "fastvideo.md": "fastvideo/models/loader/sequence_policies.py",
}
# By the script that a page's patch is written for, the others that the page says it fits, with `patch -p1`.
ALSO_PATCHED = {
    "videox_fun.md": (
        "scripts/wan2.1/train.py",
        [
            "scripts/wan2.1/train_lora.py",
            *(f"scripts/wan2.1_fun/{name}.py" for name in ("train", "train_lora", "train_control")),
        ],
    ),
}
MOST_LINES_OF_A_PATCH, MOST_LINES_OF_A_POLICY = 15, 40
NUMBERS = {"nine": 9, "ten": 10, "thirteen": 13, "fifteen": 15}
CHECKED_OUT = pytest.mark.skipif(
    CHECKOUTS is None, reason="OPENSORA_ACCEL_TRAINERS names no folder of checkouts"
)


def patch_of(page):
    (patch,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/integrations" / page).read_text("utf-8"), re.S)
    return patch


def git_apply(patch, *options, folder):
    command = ["git", "apply", *options, "-"]
    # A folder that is no repository may lie in one, and git would look for the files there.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}
    return subprocess.run(command, input=patch, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("page", REPOSITORIES)
def test_a_patch_is_well_formed_and_changes_few_lines(page, tmp_path):
    read = git_apply(patch_of(page), "--numstat", folder=tmp_path)
    assert read.returncode == 0, read.stderr
    # Lines added and lines removed, of each file.
    counts = [int(count) for line in read.stdout.splitlines() for count in line.split("\t")[:2]]
    assert 0 < sum(counts) <= MOST_LINES_OF_A_PATCH
    # As the page says, before the patch: "14 lines and a file of 32".
    said = (ROOT / "docs/integrations" / page).read_text("utf-8").partition("```diff")[0]
    ((lines, of_a_file),) = re.findall(r"(\w+) (?:changed )?lines(?:,? and a (?:new )?file of (\d+))?", said)
    assert sum(counts) == (NUMBERS.get(lines.lower()) or int(lines))
    assert of_a_file == (str(len(programs(page)[0].splitlines())) if page in POLICY_FILES else "")


@pytest.mark.parametrize("page", REPOSITORIES)
def test_what_a_patch_imports_of_this_toolkit_is_there(page):
    imports = re.findall(r"^\+(from (?:opensora_accel|shardformer)\S* import .*)$", patch_of(page), re.M)
    assert imports
    for line in imports:
        exec(line, {})


def checkout_of(page):
    """The checkout of a page's trainer.

    Skips where the folder that was named has none.
    """
    checkout = Path(CHECKOUTS) / REPOSITORIES[page]
    if not checkout.is_dir():
        pytest.skip(f"{CHECKOUTS} has no {REPOSITORIES[page]}")
    return checkout


@PROVE
@CHECKED_OUT
@pytest.mark.parametrize("page", REPOSITORIES)
def test_a_patch_applies_to_its_trainer(page):
    checked = git_apply(patch_of(page), "--check", folder=checkout_of(page))
    assert checked.returncode == 0, checked.stderr


def all_programs():
    """Each page, with its program."""
    for page in REPOSITORIES:
        yield page, importlib.import_module(f"tests.integrations.trainers.{page.removesuffix('.md')}")


def cases():
    """Every case of every program, by its page."""
    for page, program in all_programs():
        for name, case in program.CASES.items():
            yield pytest.param(page, case, id=f"{page.removesuffix('.md')}, {name}")


def cases_of_two_clips():
    """By its page, the cases of each program that has any of 4 ranks, of which two share a clip."""
    for page, program in all_programs():
        for name, case in getattr(program, "TWO_CLIPS", {}).items():
            yield pytest.param(page, case, id=f"{page.removesuffix('.md')}, {name}")


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """`copies(page)`: the trainer as it is, and as its page patches it."""

    @functools.cache
    def make(page):
        folder = tmp_path_factory.mktemp("trainer")
        plain, patched = (trainers.copy_of(checkout_of(page), folder / name) for name in ("plain", "patched"))
        applied = git_apply(patch_of(page), folder=patched)
        assert applied.returncode == 0, applied.stderr
        named, scripts = ALSO_PATCHED.get(page, ("", []))
        for script in scripts:
            moved = patch_of(page).replace(named, script)
            applied = subprocess.run(
                ["patch", "-p1"], input=moved, capture_output=True, text=True, cwd=patched
            )
            assert applied.returncode == 0, applied.stdout
        if page in POLICY_FILES:
            (patched / POLICY_FILES[page]).write_text(programs(page)[0], encoding="utf-8")
        return plain, patched

    return make


@pytest.fixture(scope="module")
def one_process(copies, tmp_path_factory):
    """`one_process(page, options)`: the steps of the trainer as it is, run once for all cases that ask for them."""

    @functools.cache
    def run_once(page, options):
        folder = tmp_path_factory.mktemp("reference")
        return trainers.run(page.removesuffix(".md"), copies(page)[0], 1, dict(options), folder)

    return run_once


@PROVE
@CHECKED_OUT
@pytest.mark.parametrize(("page", "case"), list(cases()))
def test_a_patched_trainer_takes_the_steps_of_one_process(page, case, copies, one_process, tmp_path):
    expected = one_process(page, tuple(case.reference.items()))
    assert any(gradient.any() for gradient in expected.gradients[-1].values())
    found = trainers.run(page.removesuffix(".md"), copies(page)[1], case.ranks, case.options, tmp_path)
    errors = found.errors(expected)
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(
        f"\n{page}: {len(expected.gradients)} steps, {len(expected.gradients[0])} gradients, {found.tokens}: {told}"
    )
    assert max(errors.values()) < RELATIVE[torch.float64], told


@PROVE
@CHECKED_OUT
@pytest.mark.parametrize(("page", "case"), list(cases_of_two_clips()))
def test_ranks_of_a_clip_draw_alike_and_those_of_another_otherwise(page, case, copies, tmp_path):
    """Noise and timesteps of the first step, draw by draw, on 4 ranks."""
    first, second, third, fourth = trainers.run(
        page.removesuffix(".md"), copies(page)[1], case.ranks, case.options, tmp_path
    ).draws
    # Noise and timesteps at least.
    assert len(first) >= 2
    for one, other in ((first, second), (third, fourth)):
        assert all(map(torch.equal, one, other))
    assert not any(map(torch.equal, first, third))


# The policy for DiffSynth-Studio, on a stand-in of the same names


def policy_file(page):
    """What the new file of a page defines."""
    program = programs(page)[0]
    assert len(program.splitlines()) <= MOST_LINES_OF_A_POLICY
    scope = {}
    exec(compile(program, page, "exec"), scope)
    return scope


@pytest.mark.parametrize("page", ["simpletuner.md", "fastvideo.md"])
def test_a_class_without_a_table_is_told(page):
    policies = policy_file(page)["POLICIES"]
    assert policies["WanTransformer3DModel"].self_attention
    with pytest.raises(ValueError, match=r"LTXModel of \w+ has no table .*; write one beside WAN"):
        policies["LTXModel"]


def step(plan, time_per_token):
    """Every parameter's gradient of a step, averaged over the ranks as DDP does."""
    init_parallel(plan)
    generator = torch.Generator().manual_seed(1)
    shapes = {"latents": (1, 4, 5, 6, 10), "text": (1, 7, TEXT), "time": (1,)}
    data = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
    with LiftOperations():
        module = WanTrainingModule(time_per_token).double()
        shardformer.shard(module, plan, policy=policy_file("diffsynth_studio.md")["POLICY"])
        module(data).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


@pytest.mark.parametrize("time_per_token", some([False, True]))
@pytest.mark.parametrize("plan", some([Plan(ulysses=2), Plan(ring=3), Plan(ulysses=3)]), ids=str)
def test_a_policy_about_the_whole_step_gives_one_devices_gradients(ranks, plan, time_per_token):
    """75 tokens in one loss that calls the blocks by itself; DiffSynth-Studio's checkpoint stays as it is."""
    (expected,) = ranks(1, step, Plan(), time_per_token)
    assert all(gradient.any() for gradient in expected.values())
    for found in ranks(plan.world_size, step, plan, time_per_token):
        errors = relative_errors(found, expected)
        assert max(errors.values()) < RELATIVE[torch.float64], max(errors, key=errors.get)
