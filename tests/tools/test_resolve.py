"""What the Makefile installs can be installed on other machines, and the tool that says so finds what cannot.

uv asks the index for it: where there is none to ask, nothing is shown.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import resolve
from packaging.requirements import Requirement

from tests.tiers import PROVE

ELSEWHERE = resolve.Environment("Linux x86_64", "3.12")
CPU_BUILD = resolve.Environment("Linux x86_64", "3.12", cpu_build=True)
TORCH = resolve.Install(("torch",), is_alone=False, may_build=False, may_fail=False)


def test_the_installs_are_those_of_the_makefile():
    installs = resolve.installs_of_make()
    assert installs[0] == TORCH, "first, or whatever asks for it would bring another build"
    own = next(install for install in installs if any("diffusers>=" in each for each in install.requirements))
    assert "torch" in {Requirement(each).name for each in own.requirements} and not own.may_fail
    (triton,) = (install for install in installs if install.requirements[0].startswith("triton"))
    assert triton.is_alone and triton.may_fail


def test_every_promised_environment_is_tried():
    told = [str(environment) for environment in resolve.environments()]
    for platform in ("Linux x86_64", "Linux aarch64", "macOS arm64", "Linux x86_64, CPU build of torch"):
        assert {f"{platform}, Python 3.{minor}" for minor in range(11, 15)} <= set(told)


@pytest.fixture(scope="module")
def cpu_builds(tmp_path_factory):
    if not (Path(sys.prefix) / "bin/uv").exists():
        pytest.skip("uv is not installed; make prove installs it")
    folder = tmp_path_factory.mktemp("cpu_builds")
    resolve.write_cpu_build(folder, "2.13.0")
    empty = folder / "constraints.txt"
    empty.touch()
    small = resolve.Install(("filelock",), is_alone=True, may_build=False, may_fail=False)
    reason = resolve.resolve(small, ELSEWHERE, empty, folder)
    if reason:
        pytest.skip(f"there is no index to ask: {reason}")
    return folder


@PROVE
def test_all_of_it_installs_everywhere(cpu_builds):
    assert resolve.main([]) == 0


@PROVE
def test_a_pin_that_torch_contradicts_is_found_where_it_matters(cpu_builds, tmp_path, capsys):
    constraints = tmp_path / "constraints.txt"
    shutil.copy(resolve.ROOT / "constraints.txt", constraints)
    with constraints.open("a") as file:
        file.write("triton==3.9.0\n")
    reason = resolve.resolve(TORCH, ELSEWHERE, constraints, cpu_builds)
    assert "torch==2.13.0 depends on triton" in reason and "==3.7.1" in reason and "==3.9.0" in reason
    # A machine that installs a build for a CPU does not notice.
    assert resolve.resolve(TORCH, CPU_BUILD, constraints, cpu_builds) == ""


def test_help_teaches():
    command = [sys.executable, resolve.__file__, "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--constraints" in told and "the versions to try" in told
