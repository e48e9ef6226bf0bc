"""The recipes of CONTRIBUTING.md, followed literally in a copy of the tree: its files, its diffs, its commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (\d)\. .*?\n(.*?)(?=^## )", PAGE, re.M | re.S))
# A file with its name before it, a diff, or commands; "fails" where they say that something is wrong.
BLOCKS = re.compile(r"(?:^`([\w./]+)`:\n\n)?^```(python|diff|sh|sh fails)\n(.*?)^```$", re.M | re.S)


def follow(recipe: str, tree: Path) -> list[str]:
    """What the commands printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    printed = []
    for file, kind, text in BLOCKS.findall(recipe):
        if kind == "python":
            assert file, "a file of a recipe has its name before it"
            (tree / file).write_text(text, encoding="utf-8")
        elif kind == "diff":
            change(text, tree)
        else:
            for command in text.splitlines():
                program, *arguments = command.split(" ", 1)
                module = "pytest" if program.endswith("pytest") else "opensora_accel.cli"
                run = [sys.executable, "-m", module]
                done = subprocess.run(
                    " ".join([*run, *arguments]), shell=True, cwd=tree, env=environment,
                    capture_output=True, text=True, timeout=600,
                )  # fmt: skip
                assert (done.returncode == 1) if kind == "sh fails" else (done.returncode == 0), (
                    done.stdout + done.stderr
                )
                printed.append(done.stdout)
    return printed


def change(diff: str, tree: Path) -> None:
    """Makes the changes of a diff, whose hunks say where by what stands around them."""
    for name, hunks in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", diff, re.M | re.S):
        text = (tree / name).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.M)[1:]:
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            assert text.count(before) == 1, f"{name} has this {text.count(before)} times:\n{before}"
            text = text.replace(before, after)
        (tree / name).write_text(text, encoding="utf-8")


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources, from a checkout or a source distribution."""
    left_out = shutil.ignore_patterns(".*", "build", "dist", "runs", "data", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=left_out)
    (tmp_path / "tree" / "data").symlink_to(ROOT / "data")
    return tmp_path / "tree"


def test_there_are_three_recipes_with_files_diffs_and_commands():
    assert sorted(RECIPES) == ["1", "2", "3"]
    for recipe in RECIPES.values():
        assert {kind.split()[0] for _, kind, _ in BLOCKS.findall(recipe)} == {"python", "diff", "sh"}


def num_lines(recipe: str, *rooms: str) -> int:
    """How many lines that are not empty it adds to files of these folders."""
    count = 0
    for file, kind, text in BLOCKS.findall(recipe):
        if kind == "python" and file.startswith(rooms):
            count += sum(bool(line.strip()) for line in text.splitlines())
        for name, hunks in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", text, re.M | re.S):
            if kind == "diff" and name.startswith(rooms):
                count += len(re.findall(r"^\+", hunks, re.M))
    return count


def test_the_page_says_how_long_they_are():
    source = [num_lines(RECIPES[recipe], "shardformer/", "opensora_accel/") for recipe in "12"]
    tests = [num_lines(RECIPES[recipe], "tests/") for recipe in "12"]
    of_source = f"{source[0]} lines of source for a model and {source[1]} for a field"
    assert f"{of_source}, with {tests[0]} and {tests[1]} of tests" in PAGE.replace("\n", " ")


@pytest.mark.prove
def test_a_model_is_added(tree):
    proposed, tested = follow(RECIPES["1"], tree)
    assert "57 gradients are those of one device" in proposed
    assert "[100%]" in tested and "s" not in tested.partition("[")[0]  # none was skipped


@pytest.mark.prove
def test_a_field_is_added_to_the_plan(tree):
    tested, verified = follow(RECIPES["2"], tree)
    assert "[100%]" in tested and "s" not in tested.partition("[")[0]
    assert "those of a single device" in verified


@pytest.mark.prove
def test_a_wrong_gradient_is_found(tree):
    first, second, right = follow(RECIPES["3"], tree)
    assert "scale sequence⁻¹ on 4 of 6 parameters (mlp.weight, mlp.bias, out.weight, out.bias)" in first
    assert "2 of 6 parameters (embed.weight, embed.bias)" in second
    assert "those of a single device" in right


@pytest.mark.prove
def test_a_recipe_with_a_step_left_out_fails(tree):
    with pytest.raises(AssertionError, match="PixArt"):
        follow(RECIPES["1"].replace('+    "pixart": ("PixArtTransformer2DModel",),\n', ""), tree)
