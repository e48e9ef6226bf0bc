"""What a user gets who installs the package, and who unpacks its source distribution."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import opensora_accel
from tests.tiers import PROVE

ROOT = Path(__file__).parents[1]


def build(how, into, source=ROOT):
    """Builds by setup.py's own backend, without an environment that would have to be fetched."""
    call = f"from setuptools import build_meta; print(build_meta.build_{how}({str(into)!r}))"
    ended = subprocess.run([sys.executable, "-c", call], cwd=source, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return into / ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked. What is built lies in no one's checkout."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(build("sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"), source)) as archive:
        yield archive


def tracked(folder, pattern="*"):
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }


def test_the_wheel_has_the_two_packages_whole_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    own = {name for package in ("opensora_accel", "shardformer") for name in tracked(package)}
    assert names == own
    assert {"opensora_accel/py.typed", "shardformer/py.typed"} <= names
    assert {"opensora_accel/pages/style.css", "opensora_accel/planner/plan.html"} <= names


def test_the_wheels_metadata(wheel):
    (at,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(at))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Name"] == "opensora-accel" and metadata["Version"] == opensora_accel.__version__
    assert f"## {metadata['Version']}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # An index refuses both a licence classifier beside an expression, and a classifier that it does not know.
    assert not [each for each in metadata.get_all("Classifier") if each.startswith("License ::")]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    core = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert core == ["torch<2.14,>=2.12", "numpy>=2.0"]
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "opensora-accel = opensora_accel.cli:main" in wheel.read(entry_points).decode()


def test_the_description_reads_without_the_source_tree(wheel):
    (at,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    page = email.message_from_bytes(wheel.read(at)).get_payload()
    links = re.findall(r"!?\[[^\]]*\]\(([^)]*)\)", page)
    assert not [link for link in links if not link.startswith("https://")]
    assert "# opensora-accel" in page and "each a small table" in page


def test_the_source_distribution_has_what_make_test_needs(source):
    asked = {name for folder in ("configs", "docs", "tests", "tools") for name in tracked(folder)}
    asked |= {
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
    }
    missing = {name for name in asked if not (source / name).is_file()}
    assert not missing


@PROVE
def test_the_source_distribution_has_every_test(source):
    """Importing them reads no file that was left behind."""
    assert number_of_tests(source) == number_of_tests(ROOT) > 8000


def number_of_tests(folder):
    options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "tests"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=folder, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return int(re.findall(r"(\d+) tests collected", ended.stdout)[0])
