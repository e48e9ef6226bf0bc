"""The pages in a browser, on a desk and on a telephone: nothing cut, no label over another, no two series alike.

What a test cannot see is for the eye: the pictures are written to runs/pages (or to the folder that PAGES names).
"""

import re

import pytest
import torch

from opensora_accel import cli
from opensora_accel.pages import charts
from opensora_accel.training.samples import write_video
from tests.browser import BROWSER, WIDTHS, measure, picture_of
from tests.planner.stand_in import use_stand_ins
from tests.profiler.synthetic import write_run
from tests.test_doors import training_run
from tests.tiers import each_once

KINDS = ["profile", "run", "two_profiles", "plan"]

# Written into a copy of the page, whose policy would not run it: what is measured becomes its title.
MEASURE = """
addEventListener("load", () => {
  const seen = e => e.getClientRects().length > 0;
  const width = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll("body *")].filter(e => seen(e) && !e.closest("table")
      && e.getBoundingClientRect().right > width + 1).map(e => e.tagName + " " + (e.id || e.className.baseVal
      || e.className));
  const over = [];
  for (const picture of document.querySelectorAll("svg")) {
    if (!seen(picture)) continue;
    const frame = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [i, [a, p]] of texts.entries()) {
      if (p.left < frame.left - 1 || p.right > frame.right + 1 || p.top < frame.top - 1 || p.bottom > frame.bottom + 1)
        over.push("cut: " + a);
      for (const [b, q] of texts.slice(i + 1))
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
            && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3) over.push(a + " over " + b);
    }
  }
  for (const value of document.querySelectorAll("dd"))
    if (seen(value) && value.scrollWidth > value.clientWidth + 1) over.push("cut: " + value.textContent);
  for (const video of document.querySelectorAll("video")) {
    const place = video.getBoundingClientRect();
    if (seen(video) && (video.controls || place.width < 100 || place.height < 30)) over.push("hidden: " + video.src);
  }
  const small = [...document.querySelectorAll("svg text")].filter(e => seen(e) && e.textContent.length > 3)
      .map(e => e.getBoundingClientRect())
      .map(r => Math.min(r.width, r.height)).reduce((a, b) => Math.min(a, b), 99);
  parent.postMessage(JSON.stringify({width, wide: wide.slice(0, 5), over: over.slice(0, 5), small}), "*");
});
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """name → a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    profiled = [
        write_run(folder / name, num_ranks=8, num_steps=12, num_blocks=3) for name in ("before", "after")
    ]
    assert cli.main(["report", str(profiled[0])]) == 0 and cli.main(["report", *map(str, profiled)]) == 0
    run = folder / "run"
    run.mkdir()
    training_run(run)
    for number, clip in enumerate(sorted(run.glob("samples/*/clip_1.mp4")), start=1):
        write_video(clip, torch.full((8, 48, 2 * 80, 3), 100 * number, dtype=torch.uint8), 8)
    assert cli.main(["report", str(run)]) == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_stand_ins(monkeypatch)
        asked = "--model wan2.1-14b --frames 81 --height 720 --width 1280 --gpus 16 --hardware h100x8-ib400"
        assert cli.main(["plan", *asked.split(), "--report", str(folder / "plan.html")]) == 0
    return {
        "plan": folder / "plan.html",
        "profile": folder / "before/report.html",
        "two_profiles": folder / "after/report.html",
        "run": run / "run.html",
    }


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the pages are not looked at")
@pytest.mark.parametrize(("kind", "place"), each_once(KINDS, WIDTHS, ()))
def test_nothing_is_cut_and_no_label_lies_over_another(pages, tmp_path, kind, place):
    page = pages[kind]
    picture_of(page, kind, WIDTHS[place])
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    measured = measure(text, MEASURE, tmp_path / "measured.html", WIDTHS[place])
    assert measured["width"] == WIDTHS[place]
    assert not measured["wide"] and not measured["over"], measured
    assert measured["small"] >= 7, "letters of fewer pixels are not read"
    assert (kind == "run") == ("<video" in text)


def test_no_two_series_look_alike():
    """Names of a user's own, and one kind on several axes."""
    chart = charts.Chart(height=2)
    names = ["exposed ring", "exposed mixed", "exposed tp"]
    names += [
        f"{kind} {phase}".strip() for kind in ("mine", "yours", "data", "mlp") for phase in ("", "recompute")
    ]
    for name in names:
        kind, _, phase = name.partition(" ")
        chart.style(name, kind, phase)
        chart.style(name, kind, phase)
    assert len(set(chart.styles.values())) == len(names)
    assert chart.styles["mlp recompute"] == charts.style_of("mlp", "recompute")
