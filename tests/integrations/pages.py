"""The programs that stand in docs/integrations, to be run as they stand there or with parts of them replaced."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def programs(page):
    """The Python of a page of docs/integrations, in order."""
    text = (ROOT / "docs/integrations" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)


def replaced(program, *pairs):
    """The program with parts of it replaced, each of which stands in it once."""
    for old, new in pairs:
        assert program.count(old) == 1, f"the page has no {old!r}, or more than one"
        program = program.replace(old, new)
    return program
