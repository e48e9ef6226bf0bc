"""What setup.py promises of versions is what the tool installs; the tests themselves are run by `make versions`."""

import re
import subprocess
import sys

import pytest
import versions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.tiers import PROVE

EXTRAS = versions.TRAINING.removeprefix(".[").removesuffix("]").split(",")
SETUP = (versions.ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def promised():
    """name → requirement, of everything that a user's install takes."""
    told = subprocess.run(
        [sys.executable, "-c", "import json, setuptools\n"
         "def tell(**given): print(json.dumps([given['install_requires'], given['extras_require']]))\n"
         f"setuptools.setup = tell\n__file__ = {str(versions.ROOT / 'setup.py')!r}\nexec(open(__file__).read())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    import json

    core, extras = json.loads(told.stdout)
    lines = [*core, *(line for extra in EXTRAS for line in extras[extra])]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_everything_has_a_lower_bound(promised):
    """`lowest-direct` would take the first release there ever was."""
    unbounded = [
        name for name, each in promised.items() if not any(s.operator == ">=" for s in each.specifier)
    ]
    assert not unbounded


def test_the_lowest_and_the_newest_are_tried(promised):
    lowest = [each for each in versions.ENVIRONMENTS.values() if each.resolution == "lowest-direct"]
    assert {each.requirements for each in lowest} == {(".",), (versions.TRAINING,)}
    (python,) = re.findall(r'python_requires=">=([\d.]+)"', SETUP)
    assert min((each.python for each in lowest), key=lambda text: tuple(map(int, text.split(".")))) == python
    newest = [each for each in versions.ENVIRONMENTS.values() if each.resolution == "highest"]
    assert any(each.requirements == (versions.TRAINING,) for each in newest)
    # What was installed here is within the promise too.
    import torch

    assert torch.__version__.partition("+")[0] in SpecifierSet(str(promised["torch"].specifier))


def test_an_environment_that_cannot_be_had_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(versions.ENVIRONMENTS, "nowhere", versions.Environment("3.99", (".",)))
    assert versions.main(["--only", "nowhere", "--folder", str(tmp_path)]) == 0
    assert "left out: there is no Python 3.99" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        versions.main(["--only", "rubbish"])


@PROVE
def test_tests_that_fail_fail_the_command(capsys, tmp_path, monkeypatch):
    """In an environment without torch, made as the others are."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "other"\nversion = "1"\n[tool.setuptools]\npy-modules = []\n'
    )
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setitem(versions.ENVIRONMENTS, "empty", versions.Environment(here, (".",), tests=("tests",)))
    (tmp_path / "tests").mkdir()
    for body, status in (("pass", 0), ("assert False", 1)):
        (tmp_path / "tests/test_it.py").write_text(f"def test_it(): {body}\n")
        assert versions.main(["--only", "empty", "--folder", str(tmp_path)]) == status, capsys.readouterr()
