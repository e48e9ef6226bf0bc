"""The page: every number is the JSON's, nothing is loaded, it is small, and Chromium opens it."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
import time

import pytest

from opensora_accel.cli import main
from opensora_accel.pages.templates import percent, ratio, seconds, size, speed
from opensora_accel.profiler import page
from opensora_accel.profiler.report import write_report
from tests.profiler.synthetic import write_run
from tests.tiers import PROVE

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two runs side by side: their page and their numbers."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / name / "profile", case)
        for name, case in (("a", "slow data"), ("b&b", "exposed ring"))
    ]
    out = folder / "report.html"
    write_report(runs, out, compare=True, label="synthetic <run>")
    return out


class Numbers(html.parser.HTMLParser):
    """What a page shows: (path, value, text) of every <data>, and counts of elements."""

    def __init__(self, text):
        super().__init__()
        self.numbers, self.tags, self.addresses, self.open = [], {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.addresses += [attrs[name] for name in ("href", "src", "xlink:href") if name in attrs]
        if tag == "data":
            self.open = [attrs["data-path"], attrs["value"], ""]

    def handle_data(self, data):
        if self.open:
            self.open[2] += data

    def handle_endtag(self, tag):
        if tag == "data":
            self.numbers.append(self.open)
            self.open = None


def at(document, path):
    for key in path.split("/"):
        document = document[int(key) if isinstance(document, list) else key]
    return document


def shown_value(text):
    """The number that a text says, in the units of the JSON, and how far rounding may take it off."""
    number, unit = re.fullmatch(r"(-?[\d.,]+(?:e[+-]?\d+)?)\s*(.*)", text).groups()
    scale = {
        "": 1, "s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "%": 0.01, ": 1": 1, "T": 1e12,
        "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "GB/s": 1e9, "MB/s": 1e6,
    }[unit]  # fmt: skip
    return float(number.replace(",", "")) * scale, 0.0006 if unit == "%" else 0.0


def check_numbers(numbers, document):
    assert len(numbers) > 500
    for path, value, text in numbers:
        known = at(document, path)
        assert float(value) == known, path
        shown, off = shown_value(text)
        assert shown == pytest.approx(known, rel=0.006, abs=off + 1e-12), (path, text)


def test_every_number_on_the_page_is_the_jsons(compared):
    document = json.loads(compared.with_suffix(".json").read_text())
    read = Numbers(compared.read_text())
    check_numbers(read.numbers, document)
    paths = {path for path, _, _ in read.numbers}
    for needed in (
        "runs/0/step_s/median",
        "runs/0/ranks/2/parts/0/seconds/median",
        "runs/1/axes/0/exposed_s",
        "runs/1/sizes/0/bytes_per_s",
        "runs/0/idle/0/mean_s",
        "runs/0/critical_path/0/rank_s",
        "runs/0/late_ranks/0/mean_s",
        "runs/1/sent/0/2",
        "runs/0/memory/memory/0/1/parameters",
        "runs/0/offload/lanes/1/seconds",
        "runs/0/steps/3/loss",
        "runs/0/utilization/mfu",
        "changes/0/difference",
    ):
        assert needed in paths, needed


def test_the_page_loads_nothing_and_has_a_table_for_every_picture(compared):
    text = compared.read_text()
    read = Numbers(text)
    assert "script" not in read.tags and "default-src 'none'" in text
    assert all(address.startswith(("#", "data:")) for address in read.addresses)
    assert read.tags["figure"] == read.tags["figcaption"] == 16
    assert len(re.findall(r"</figure>\s*<details><summary>.*?</summary>\s*<div[^>]*><table>", text)) == 16
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(identifiers)
    assert "synthetic &lt;run&gt;" in text and "<run>" not in text
    assert '<th scope="col">b&amp;b/profile</th>' in text
    assert text.index("What stands out</h2>") < text.index("Where the step goes</h2>")
    for colour in ("#010203", "#040506", "#070809", "#000000"):
        assert colour not in text, "a colour that does not follow the page"


def test_the_command_says_who_waits_for_what(tmp_path, capsys):
    assert main(["report", str(write_run(tmp_path / "run", "slow data"))]) == 0
    lines = {line.split(":")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "late ranks" in lines["the devices wait for"] and "data" in lines["the devices wait for"]
    assert re.search(r"data \d+\.\d% \(rank 2\)", lines["the step is made of"])
    assert "rank 2, 7 of them" in lines["others wait for"] and "1 × all-reduce over mixed" in lines["calls"]
    assert "kernels" not in lines, "nothing was traced"


def test_what_changed_comes_first_by_how_much(compared):
    document = json.loads(compared.with_suffix(".json").read_text())
    weights = [change["weight"] for change in document["changes"]]
    assert weights == sorted(weights, reverse=True)
    named = {change["name"]: change for change in document["changes"]}
    assert named["data"]["after"] < named["data"]["before"]
    assert named["exposed ring"]["after"] > named["exposed ring"]["before"]
    step = named["mean step"]
    assert step["difference"] == step["after"] - step["before"] < 0
    assert document["settings"] == [], "the two runs have one Plan"


def test_a_run_that_measured_little(tmp_path):
    from opensora_accel.profiler.records import RecordWriter, RunRecord, StepRecord

    writer = RecordWriter(tmp_path, RunRecord(0, 1))
    writer.step(StepRecord(0, 0.0, 2.0))
    writer.close()
    document = write_report([tmp_path], tmp_path / "report.html")
    text = html.unescape((tmp_path / "report.html").read_text())
    for sentence in (
        "recorded no memory",
        "did not communicate",
        "Nothing was copied",
        "Nothing stands out",
        "the run does not know the model's operations",
        "holds the warm-up",
    ):
        assert sentence in text, sentence
    assert document["runs"][0]["utilization"]["mfu"] is None


def test_the_command(tmp_path, capsys):
    run = write_run(tmp_path / "profile", "imbalance", num_ranks=4, num_steps=3)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "1. work is uneven: rank 2" in said and "try: spread the tokens" in said
    assert (run / "report.html").exists() and (run / "report.json").exists()
    for arguments, message in (
        ([str(run), "--compare"], "--compare needs two runs, and there are 1"),
        ([str(run), "--out", "page.pdf"], "must end in .html"),
        ([str(tmp_path)], "no rank_*.jsonl; give the folder that a profiled run wrote"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_it_is_made_without_torch(tmp_path):
    """Each of the processes that read records would take seconds to import it."""
    run = write_run(tmp_path / "profile", num_ranks=2, num_steps=3)
    code = "import sys; from opensora_accel.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "report", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    ("formatter", "value", "text"),
    [
        (seconds, 0.765, "765 ms"),
        (seconds, 0.0, "0 s"),
        (seconds, -2e-5, "-20 µs"),
        (seconds, 4321.0, "4,321 s"),
        (size, 5 * 2**30, "5 GiB"),
        (size, 1010 * 2**20, "1,010 MiB"),
        (speed, 2.03e10, "20.3 GB/s"),
        (speed, 5e6, "5 MB/s"),
        (percent, 0.1234, "12.3%"),
        (ratio, 1.52, "1.52 : 1"),
    ],
)
def test_units(formatter, value, text):
    assert formatter(value) == text


@PROVE
def test_sixty_four_ranks_fit_in_five_megabytes(tmp_path):
    run = write_run(tmp_path / "run", "congested link", num_ranks=64, num_steps=20)
    write_report([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5e6


@pytest.mark.alone
def test_a_page_is_made_of_a_gigabyte_in_a_minute(tmp_path):
    run = write_run(tmp_path / "run", "congested link", num_ranks=64, num_steps=20, num_blocks=260)
    read_bytes = sum(path.stat().st_size for path in run.rglob("*"))
    assert read_bytes >= 1e9
    command = [
        sys.executable,
        "-m",
        "opensora_accel.cli",
        "report",
        str(run),
        "--out",
        str(tmp_path / "a.html"),
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken_s = time.perf_counter() - start
    made_bytes = (tmp_path / "a.html").stat().st_size
    print(f"{read_bytes / 1e9:.2f} GB read, {made_bytes / 1e6:.2f} MB made in {taken_s:.1f} s")
    assert taken_s < 60 and made_bytes < 5e6


@PROVE
def test_a_page_of_thousands_of_steps_stays_small(tmp_path):
    run = write_run(tmp_path / "run", "slow data", num_ranks=2, num_steps=3)
    write_report([run], tmp_path / "report.html")
    document = json.loads((tmp_path / "report.json").read_text())
    first, *others = document["runs"][0]["steps"]
    number_of_steps, slowest = 4000, 3210
    steps = [first] + [others[i % len(others)] | {"step": i} for i in range(2, number_of_steps + 1)]
    steps[slowest - 1] |= {"seconds": 9.0}
    document["runs"][0] |= {"steps": steps, "num_steps": number_of_steps}
    text = page.page(document)
    assert len(text) < 1e6
    numbers = Numbers(text).numbers
    check_numbers(numbers, document)
    shown = {int(float(value)) for path, value, _text in numbers if re.search(r"steps/\d+/step$", path)}
    assert slowest in shown and len(shown) < 1000


def browse(*options):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here; apt-get install chromium")
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    logged = ["--enable-logging=stderr", "--v=0"]
    done = subprocess.run([browser, *always, *logged, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@PROVE
def test_chromium_shows_the_numbers_without_an_error(compared):
    text, messages = browse("--dump-dom", compared.as_uri())
    assert messages == []
    check_numbers(Numbers(text).numbers, json.loads(compared.with_suffix(".json").read_text()))


@PROVE
def test_chromiums_errors_are_seen(tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text("<!DOCTYPE html><script>nothing.here()</script>")
    assert any("nothing is not defined" in line for line in browse("--dump-dom", page.as_uri())[1])


@PROVE
@pytest.mark.parametrize("width", [1280, 390])
def test_chromium_draws_light_and_dark(compared, tmp_path, width):
    from PIL import Image

    backgrounds = []
    for scheme in (0, 1):
        picture = tmp_path / f"{scheme}.png"
        size, to = f"--window-size={width},2400", f"--screenshot={picture}"
        # 0 is dark and 1 is light.
        browse(f"--blink-settings=preferredColorScheme={scheme}", size, to, compared.as_uri())
        image = Image.open(picture).convert("L")
        assert image.width == width
        backgrounds.append(image.getpixel((2, 2)))
    assert backgrounds[0] < 60 and backgrounds[1] > 220


@PROVE
def test_chromium_shows_the_page_of_a_training_run_and_its_clips(tmp_path):
    import torch

    from opensora_accel.profiler.run_page import write_run_page
    from opensora_accel.training.samples import SampledClip, write_comparison

    rows = [{"step": step, "loss": 1 / step, "step_s": 1.0, "tokens": 8} for step in (1, 2)]
    (tmp_path / "config.json").write_text('{"steps": 2}')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clip = torch.randint(0, 256, (5, 24, 40, 3), dtype=torch.uint8)
    write_comparison(tmp_path / "samples" / "step_000002", [SampledClip("a clip", clip, clip, 8.0)])
    # What the page's policy keeps from being loaded is told in the console.
    text, messages = browse("--dump-dom", "--virtual-time-budget=3000", write_run_page(tmp_path).as_uri())
    assert messages == [] and "samples/step_000002/clip_1.mp4" in text
