"""The site of the guides: strict about links, whole, and each page within its window on a desk and on a telephone."""

import importlib.util
import re
import shutil

import build_docs
import pytest

from tests.browser import BROWSER, WIDTHS, measure, picture_of
from tests.test_names import NAMES

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="make docs installs Sphinx"),
]

# Into a copy of the page: how wide it is, and what of it a reader can neither see nor scroll to.
MEASURE = """
addEventListener("load", () => {
  const width = document.documentElement.clientWidth;
  const all = [...document.querySelectorAll("article *")].filter(e => e.getClientRects().length);
  const cut = all.filter(e => !e.closest("table, pre, .sig") && e.getBoundingClientRect().right > width + 1);
  const page = document.documentElement.scrollWidth;
  parent.postMessage(JSON.stringify({width, page, cut: cut.slice(0, 5).map(e => e.tagName + " " + e.className)}), "*");
});
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert build_docs.main(["--out", str(folder)]) == 0
    return folder / "html"


def test_every_page_and_every_public_name_is_there(site):
    pages = [path.relative_to(build_docs.DOCS).with_suffix(".html") for path in build_docs.DOCS.rglob("*.md")]
    assert len(pages) > 30 and [page for page in pages if not (site / page).is_file()] == []
    described = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    # Which have a heading, and functions below it.
    modules = {name for name in NAMES if build_docs.kind(name) == "module"}
    assert {
        name for name in NAMES if not name.startswith("shardformer.colossalai.")
    } - described - modules == set()
    assert {"shardformer.packing.run_packed", "opensora_accel.attention.slices.deal"} <= described
    listed = [page for pages in build_docs.CONTENTS.values() for page in pages]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    "link", ["", "[there](nowhere.md)", "[there](offload.md#no-such-heading)", "![there](none.png)"]
)
def test_a_broken_link_ends_it(tmp_path, monkeypatch, link):
    left_out = shutil.ignore_patterns(".*", "build", "dist", "runs", "data", "__pycache__", "*.egg-info")
    tree = shutil.copytree(build_docs.ROOT, tmp_path / "tree", ignore=left_out)
    monkeypatch.setattr(build_docs, "ROOT", tree)
    monkeypatch.setattr(build_docs, "DOCS", tree / "docs")
    page = tree / "docs" / "faults.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{link}\n", encoding="utf-8")
    assert bool(build_docs.main(["--out", str(tmp_path / "site")])) == bool(link)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the pages are not looked at")
@pytest.mark.parametrize("place", WIDTHS)
@pytest.mark.parametrize(
    "page", ["index", "api", "names", "policies", "measured", "integrations/README", "contributing"]
)
def test_a_page_is_no_wider_than_its_window(site, page, place):
    path = site / f"{page}.html"
    picture_of(path, f"docs_{page.replace('/', '_')}", WIDTHS[place])
    copy = path.with_name(f"{path.stem}_measured.html")  # beside it, for its styles
    measured = measure(path.read_text(encoding="utf-8"), MEASURE, copy, WIDTHS[place])
    assert measured == {"width": WIDTHS[place], "page": WIDTHS[place], "cut": []}
