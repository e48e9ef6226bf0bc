"""The pages in a browser, on a desk and on a telephone: nothing cut, no label over another, no two series alike.

What a test cannot see is for the eye: the pictures are written to runs/pages (or to the folder that PAGES names).
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from opensora_accel import cli
from opensora_accel.pages import charts
from opensora_accel.training.samples import write_video
from tests.planner.stand_in import use_stand_ins
from tests.profiler.synthetic import write_run
from tests.test_doors import training_run
from tests.tiers import each_once

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = Path(os.environ.get("PAGES") or Path(__file__).parents[2] / "runs/pages")
KINDS = ["profile", "run", "two_profiles", "plan"]
WIDTHS = {"desk": 1280, "telephone": 390}

# Written into a copy of the page, whose policy would not run it: what is measured becomes its title.
MEASURE = """<script>
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
</script>"""


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


def browser(width, *arguments):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    return subprocess.run(
        [*command, f"--window-size={width},6000", *map(str, arguments)], capture_output=True, text=True, timeout=90
    )  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the pages are not looked at")
@pytest.mark.parametrize(("kind", "place"), each_once(KINDS, WIDTHS, KINDS[:2]))
def test_nothing_is_cut_and_no_label_lies_over_another(pages, tmp_path, kind, place):
    page = pages[kind]
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{kind}_{WIDTHS[place]}.png"
    browser(WIDTHS[place], f"--screenshot={picture}", page.as_uri())
    assert picture.stat().st_size > 10_000
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace(
        "</body>", MEASURE + "</body>"
    )
    copy = tmp_path / "measured.html"
    copy.write_text(text, encoding="utf-8")
    # A window is never narrower than 500 pixels; a frame in it is.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe style="border:0;width:{WIDTHS[place]}px;height:6000px" src="{copy.as_uri()}"></iframe>'
        "<script>addEventListener('message', told => document.body.innerHTML = '<pre>' + told.data + '</pre>')</script>"
    )
    told = browser(1400, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()).stdout
    found = re.search(r"<pre>(.*?)</pre>", told, re.S)
    assert found, told[-500:]
    measured = json.loads(html.unescape(found[1]))
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
