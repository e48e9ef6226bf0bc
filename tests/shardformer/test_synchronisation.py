"""No step waits for the GPU: every policy, forward and backward, on a device that has no numbers to give."""

import json
import subprocess
import sys

import pytest

from tests.tiers import PROVE
from tests.video_models import CASES

PLANS = {
    "both": {"ring": 2, "ulysses": 2},
    "ulysses": {"ulysses": 2},
    "overlapped": {"ulysses": 2, "overlap_ulysses": True},
}
# It waits in places of its own code, which is let pass, and has grouped heads.
FEW = ["Cosmos 3"]


# These models look at the numbers of their own inputs, actions and text positions, and of these a block mask is read
# into slices, once a mask. This device has none.
LOOKS = (
    *("Cosmos 3, sound and action", "JoyImage-Edit, text positions"),
    *("AnyFlow FAR", "AnyFlow FAR, clean frames"),
)
ALL = [name for name in CASES if name not in LOOKS]
OVERLAPPED = pytest.param(["Wan"], "overlapped", marks=pytest.mark.prove)
EVERY = [pytest.param(ALL, plan, marks=pytest.mark.prove) for plan in ("both", "ulysses")]


@PROVE
@pytest.mark.slow
@pytest.mark.parametrize(("names", "plan"), [(FEW, "both"), OVERLAPPED, *EVERY])
def test_no_policy_waits_for_the_device(names, plan):
    # In a process of its own, because the device stays defined.
    program = [sys.executable, "-m", "tests.stand_in_gpu", json.dumps(PLANS[plan]), *names]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=1200)
    found = {row["model"]: row["waits"] for row in map(json.loads, ended.stdout.splitlines())}
    assert list(found) == names, ended.stderr[-2000:]
    assert not any(found.values()), found
