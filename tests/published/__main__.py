"""What our tools say of a published bug and of its right twin: `python -m tests.published VeOmni#338 …`.

Without a name, of all of them; with `--page` it writes the tables of docs/published.md as well.
"""

from __future__ import annotations

import sys
import warnings

from opensora_accel.verify import RankPool
from tests.published.page import first_line, write
from tests.published.suite import BUGS, NOT_FOUND_YET


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    names = [name for name in arguments if name != "--page"]
    chosen = [bug for bug in BUGS if not names or bug.name.replace(" #", "#") in names]
    if len(chosen) < len(names):
        known = ", ".join(bug.name.replace(" #", "#") for bug in BUGS)
        print(f"there is no such bug among {' '.join(names)}; there are {known}", file=sys.stderr)
        return 2
    says = {}
    with RankPool(preload=["tests.published.suite"]) as ranks:
        for bug in chosen:
            print(
                f"{bug.repository} #{bug.number} ({bug.year}), by {bug.step.__module__}.{bug.step.__name__}\n"
            )
            print(f"  {bug.mechanism}\n")
            for is_wrong in (True, False):
                found = bug.found(ranks, is_wrong)
                lines = [line for line, _ in found] or [
                    NOT_FOUND_YET.get(bug.name, "") if is_wrong else "nothing"
                ]
                print(f"  {'wrong' if is_wrong else 'right'}: " + "\n         ".join(lines))
                says.setdefault(bug.name, first_line(found))
            print(flush=True)
    if "--page" in arguments:
        if names:
            print("the page is about all of them: leave out the names", file=sys.stderr)
            return 2
        write(says)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
