"""No label of a picture lies over another, none is cut, and a telephone shows them large enough, by their coordinates.

An SVG says where a label begins, not how wide it is: widths are estimated by letter, a little on the wide side, because
a page has the fonts of whoever reads it.
"""

import json
import re
from collections import Counter
from itertools import combinations

import pytest

from opensora_accel import cli
from opensora_accel.pages import charts
from opensora_accel.planner.page import page as plan_page
from opensora_accel.profiler.report import write_report
from tests.planner.stand_in import use_stand_ins
from tests.profiler.synthetic import write_run
from tests.test_doors import training_run
from tests.tiers import PROVE

# Of the letters' size: widths as of DejaVu Sans, which is wide, and how far a label reaches over and under its line.
NARROW, WIDE, USUAL = 0.4, 0.9, 0.62
ABOVE, BELOW = 0.76, 0.2
# Pixels that a picture has on a telephone of 390, beside margins, and the least for letters of it.
TELEPHONE, LEAST = 342, 8.5


def width_of(text, size):
    widths = [
        NARROW if letter in "iljftr.,:;!'|I() " else WIDE if letter in "mwMWG%" else USUAL for letter in text
    ]
    return size * sum(widths)


def labels_of(svg):
    """(text, size, left, top, right, bottom) of each label."""
    for style, place, text in re.findall(r'<text style="([^"]*)"([^>]*)>([^<]*)</text>', svg):
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        if found := re.search(r'x="([-\d.]+)" y="([-\d.]+)"', place):
            x, y = map(float, found.groups())
        else:
            x, y = map(float, re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", place).groups())
        angle = float((re.search(r"rotate\((-?[\d.]+)", place) or [0, "0"])[1])
        width, anchor = width_of(text, size), re.search(r"text-anchor: (\w+)|$", style)[1]
        begin = {"middle": -width / 2, "end": -width}.get(anchor, 0.0)
        if abs(angle) == 90:
            yield text, size, x - ABOVE * size, y - begin - width, x + BELOW * size, y - begin
        else:
            assert angle == 0, (text, angle)
            yield text, size, x + begin, y - ABOVE * size, x + begin + width, y + BELOW * size


def faults_of(svg):
    name = re.search(r'<svg class="([^"]*)"', svg)[1]
    _, _, width, height = map(float, re.search(r'viewBox="([^"]*)"', svg)[1].split())
    labels = list(labels_of(svg))
    assert labels or "text" not in svg
    is_for_telephones = name.split()[-1] in ("narrow", "curve")
    for text, size, left, top, right, bottom in labels:
        if left < -2 or top < -2 or right > width + 2 or bottom > height + 2:
            yield f"{name}: {text!r} is cut"
        if is_for_telephones and size * TELEPHONE / width < LEAST:
            yield f"{name}: {text!r} has letters of {size * TELEPHONE / width:.1f} pixels"
    for (one, _, left, top, right, bottom), (other, _, left_, top_, right_, bottom_) in combinations(
        labels, 2
    ):
        if min(right, right_) > max(left, left_) and min(bottom, bottom_) > max(top, top_):
            yield f"{name}: {one!r} over {other!r}"


def pictures_of(page):
    svgs = re.findall(r"<svg .*?</svg>", page, re.S)
    assert svgs
    return svgs


def check(page):
    svgs = pictures_of(page)
    assert not [fault for svg in svgs for fault in faults_of(svg)]
    for svg in svgs:
        if 'class="pareto' in svg:
            numbers = [each for each in labels_of(svg) if re.fullmatch(r"[\d.]+", each[0])]
            # Those below the picture are on one line, those beside it end at one line. One number is no scale.
            below = Counter(round(bottom) for *_, bottom in numbers).most_common(1)[0][1]
            beside = Counter(round(right) for *_, right, _ in numbers).most_common(1)[0][1]
            assert below >= 2 and beside >= 2, [each[0] for each in numbers]


REPORTS = {
    "healthy": {"case": "healthy", "num_steps": 12, "num_blocks": 3},
    "two ranks": {"case": "exposed ring", "num_ranks": 2},
    "many ranks": {"case": "congested link", "num_ranks": 32, "num_steps": 3, "num_blocks": 2},
    "one step": {"case": "slow data", "num_steps": 1},
}


@pytest.mark.parametrize("name", REPORTS)
def test_labels_of_a_report(tmp_path, name):
    write_report([write_run(tmp_path / "run", **REPORTS[name])], tmp_path / "report.html")
    check((tmp_path / "report.html").read_text())


def test_labels_of_a_run(tmp_path):
    training_run(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    check((tmp_path / "run.html").read_text())


PLANS = {
    "16 h100": "--frames 81 --height 720 --width 1280 --gpus 16 --hardware h100x8-ib400",
    "4 rtx4090": "--frames 49 --height 480 --width 832 --gpus 4 --hardware rtx4090x4",
    "1 gpu": "--frames 17 --height 256 --width 256 --gpus 1 --hardware a100",
}


@pytest.mark.parametrize("name", PLANS)
def test_labels_of_a_plan(tmp_path, monkeypatch, name):
    use_stand_ins(monkeypatch)
    written = ["--report", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")]
    assert cli.main(["plan", "--model", "wan2.1-14b", *PLANS[name].split(), *written]) == 0
    check((tmp_path / "plan.html").read_text())
    # The same of other sizes: of plans that hardly differ, and of those that are far apart.
    document = json.loads((tmp_path / "plan.json").read_text())
    document |= {"timeline": None, "memory": None}
    for count, factor in ((len(document["candidates"]), 4000.0), (2, 37.0), (2, 1.3)):
        scaled = [
            each | {"seconds_per_sample": each["seconds_per_sample"] * factor}
            for each in document["candidates"][:count]
        ]
        check(plan_page(document | {"candidates": scaled}))


@PROVE
@pytest.mark.parametrize(
    "size", ["--frames 81 --height 480 --width 832", "--frames 17 --height 256 --width 256"]
)
def test_labels_of_a_traced_plan(tmp_path, size):
    asked = f"--model wan2.1-1.3b {size} --gpus 4 --hardware rtx4090x4"
    assert cli.main(["plan", *asked.split(), "--report", str(tmp_path / "plan.html")]) == 0
    check((tmp_path / "plan.html").read_text())


@pytest.mark.parametrize(
    ("num_ranks", "sent_bytes"), [(2, 5.4e10), (8, 1.7e6), (8, 1.234e9), (16, 5e3), (64, 3), (256, 1.2e9)]
)
def test_the_matrix_can_be_read(num_ranks, sent_bytes):
    pairs = [
        (i, j, sent_bytes * (1 + (j == i + 1) * 700))
        for i in range(num_ranks)
        for j in range(num_ranks)
        if i != j
    ]
    text = str(charts.sent_matrix(pairs, num_ranks, "m-sent"))
    check(text)
    if num_ranks <= 8:
        # Every pair has its number, of the same unit as the scale beside it.
        wide = pictures_of(text)[0]
        shown = [label for label, *_ in labels_of(wide)]
        unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[
            next(re.match(r"(\w+) per step", each)[1] for each in shown if "per step" in each)
        ]
        # Numbers in cells have a box behind them.
        numbers = sorted(float(each.replace("~", "")) for each, size, *_ in labels_of(wide) if size == 8)
        assert len(numbers) == len(pairs)
        assert numbers == pytest.approx(sorted(size / unit for *_, size in pairs), rel=0.06, abs=0.01)
        assert max(numbers) < 1024


def test_an_overlap_would_be_seen():
    label = '<text style="font-size: 10px; text-anchor: middle" x="{}" y="50" transform="rotate(-0 {} 50)">12345</text>'
    svg = '<svg class="a narrow" viewBox="0 0 309 100">{}{}</svg>'
    apart, over, cut = (
        svg.format(*(label.format(x, x) for x in pair)) for pair in ((50, 90), (50, 70), (5, 90))
    )
    assert list(faults_of(apart)) == []
    assert list(faults_of(over)) == ["a narrow: '12345' over '12345'"]
    assert list(faults_of(cut)) == ["a narrow: '12345' is cut"]
