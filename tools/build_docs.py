"""Builds the guides as a site: README first, then by what a reader looks for, and an API from docstrings.

    python tools/build_docs.py            # build/site/html, strict: a broken link or reference ends it

The pages of docs/ are read in a repository's own viewer too. What only the site has (a front page with contents, an
API) is made here from README, CONTRIBUTING, CHANGELOG and docs/names.md, in a copy that Sphinx reads.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "site"

# Every page, by what a reader looks for.
CONTENTS = {
    "Start": ["training", "launchers", "integrations/README"],
    "Guides": [
        *(
            "attention",
            "offload",
            "sharded_parameters",
            "tensor_parallel",
            "policies",
            "packing",
            "norms",
            "collectives",
        ),
        *("planner", "verify", "watching", "profiling", "saved_state", "minimax_h3", "colossalai"),
    ],
    "Reference": ["names", "api", "sharding", "changelog"],
    "How it works": ["architecture", "faults", "contributing"],
    "Measured": ["measured", "attention_bench", "scaling", "techniques", "peers", "published", "gpu"],
}
# Pages of the root, and what they are called in the site.
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def stage(source: Path) -> None:
    """Writes what Sphinx reads."""
    shutil.copytree(DOCS, source)
    for name, staged in FROM_ROOT.items():
        shutil.copy(ROOT / name, source / staged)
    for page in sorted(source.rglob("*.md")):
        at = page.relative_to(source)
        written = next((ROOT / name for name, staged in FROM_ROOT.items() if staged == str(at)), DOCS / at)
        page.write_text(with_links(page.read_text(encoding="utf-8"), written, page, source), encoding="utf-8")
    with (source / "index.md").open("a", encoding="utf-8") as index:
        index.write(contents())
    with (source / "integrations" / "README.md").open("a", encoding="utf-8") as index:
        others = sorted(path.stem for path in (source / "integrations").glob("*.md"))
        listed = [name for name in others if name != "README"]
        index.write(tree("", listed))
    (source / "api.md").write_text(api(), encoding="utf-8")


def with_links(text: str, written: Path, page: Path, source: Path) -> str:
    """The text of a page, whose links lead to where pages and files are from the site's copy of it."""

    def moved(link: re.Match[str]) -> str:
        target, heading = link[1], link[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        found = (written.parent / target).resolve()
        if found.parent == ROOT and found.name in FROM_ROOT:
            staged = source / FROM_ROOT[found.name]
        elif found.is_relative_to(DOCS):
            staged = source / found.relative_to(DOCS)
        else:
            # A file of the repository, to be downloaded, also where it is Markdown and could be a page.
            return f"](path:{os.path.relpath(found, page.parent)})"
        return f"]({os.path.relpath(staged, page.parent)}{heading})"

    return _LINK.sub(moved, text)


def tree(caption: str, pages: Sequence[str]) -> str:
    title = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{title}\n" + "\n".join(pages) + "\n```\n"


def contents() -> str:
    return "".join(tree(caption, pages) for caption, pages in CONTENTS.items())


def api() -> str:
    """A page of the public names, by module, in the order of docs/names.md."""
    names = re.findall(r"^\| `([\w.]+)`", (DOCS / "names.md").read_text(encoding="utf-8"), re.M)
    lines = ["# API", "", "[The public names](names.md), from their docstrings.", ""]
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        lines += [f"## {module}", "", "```{eval-rst}"]
        for name in names:
            if name.rpartition(".")[0] == module:
                # A Plan's fields say what they are, and so do a module's functions.
                has_members = name == "opensora_accel.Plan" or kind(name) == "module"
                members = ["   :members:"] if has_members else []
                lines += [f".. auto{kind(name)}:: {name}", *members, ""]
        lines += ["```", ""]
    return "\n".join(lines)


def kind(name: str) -> str:
    """What Sphinx calls the object: module, class, function or data."""
    module, _, attribute = name.rpartition(".")
    if module == "shardformer.colossalai":  # which imports ColossalAI
        return "function"
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, types.ModuleType):
        return "module"
    return "class" if isinstance(found, type) else "function" if callable(found) else "data"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of the site, made anew (%(default)s)")
    out = parser.parse_args(arguments).out
    for folder in ("source", "html"):
        shutil.rmtree(out / folder, ignore_errors=True)
    stage(out / "source")
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run([*sphinx, str(out / "source"), str(out / "html")], cwd=ROOT)
    if done.returncode == 0:
        print(f"{out / 'html' / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
