"""`opensora-accel plan`: what it prints and writes; and a real small model from the command line to a Plan."""

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from opensora_accel import cli
from opensora_accel.plan import Plan
from opensora_accel.planner import command, plan_for
from opensora_accel.planner.candidates import GIB, Residents
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.jobs import Job
from opensora_accel.planner.models import MODELS
from opensora_accel.planner.page import frontier, page
from opensora_accel.training import job_of
from tests.planner.stand_in import use_stand_ins
from tests.tiers import PROVE

CLIP = ("--model", "wan2.1-14b", "--frames", "81", "--height", "720", "--width", "1280")
ON = ("--gpus", "16", "--hardware", "h100x8-ib400")
WRITTEN = ("--output", "plan.json")


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Every model is a few operations; files are written to a folder of the test."""

    use_stand_ins(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return cli.main(["plan", *arguments])


def test_the_best_plan_is_told_and_written_where_asked(stand_in, capsys):
    assert run(*CLIP, *ON) == 0 and not list(stand_in.iterdir())
    assert "--output plan.json writes" in capsys.readouterr().out
    assert run(*CLIP, *ON, *WRITTEN) == 0
    told = capsys.readouterr().out
    assert (
        "(simulated)" in told
        and "the best" in told
        and "memory at the peak" in told
        and "wrote plan.json" in told
    )
    plan = Plan.load(stand_in / "plan.json")
    assert plan.world_size == 16 and plan.precision == "bf16"


def test_every_candidate_is_in_the_json(stand_in):
    assert run(*CLIP, *ON, *WRITTEN, "--json", "all.json") == 0
    document = json.loads((stand_in / "all.json").read_text())
    assert len(document["candidates"]) > 200
    for each in document["candidates"]:
        for name in ("memory_bytes", "step_time_s"):
            low, high = each[name]
            assert 0 < low <= high
        assert sum(each["bytes_by_kind"].values()) > 0 and sum(each["seconds_by_kind"].values()) > 0
        assert Plan.from_dict(each["plan"]).world_size == 16
        assert each["reason"] or each == document["candidates"][0]
    assert document["best"]["plan"] == Plan.load(stand_in / "plan.json").to_dict()
    assert document["explanation"]["neighbours"] and document["sources"]


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.paths, self.ids, self.links = [], set(), []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "data":
            self.paths.append((given["data-path"], given["value"]))
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a":
            self.links.append(given["href"])
        assert tag != "script" and not (given.get("src") or "").startswith("http")


def test_the_page_has_the_numbers_of_the_document(stand_in):
    assert run(*CLIP, *ON, "--report", "plan.html", "--json", "all.json") == 0
    document = json.loads((stand_in / "all.json").read_text())
    text = (stand_in / "plan.html").read_text()
    seen = Page()
    seen.feed(text)
    assert len(seen.paths) > 100 and all(link[1:] in seen.ids for link in seen.links)
    for path, value in seen.paths:
        found = document
        for key in re.split("/", path):
            found = found[int(key)] if isinstance(found, list) else found[key]
        assert repr(found) == value
    compute = document["timeline"]["compute"]
    assert {part["operators"] for part in compute} == {"matrix products", "attention", "elementwise"}
    busy_s = next(lane["busy_s"] for lane in document["timeline"]["lanes"] if lane["name"] == "compute")
    assert sum(part["busy_s"] for part in compute) == pytest.approx(busy_s)
    assert text.count('role="img"') == 2 * 4 and "Time against memory" in text
    assert document["explanation"]["placement"] in text and " between nodes" in text


def test_words_of_the_document_are_text_on_the_page(stand_in):
    def hostile(value):
        if isinstance(value, dict):
            return {key: hostile(each) for key, each in value.items()}
        if isinstance(value, list):
            return [hostile(each) for each in value]
        return f"{value}<script>'\"&" if isinstance(value, str) else value

    assert run(*CLIP, *ON, "--json", "all.json") == 0
    document = hostile(json.loads((stand_in / "all.json").read_text()))
    document["excluded"] = {"<script>": 1}
    document["sources"]["<script>"] = document["explanation"]["bytes_by_kind"]["<script>"] = 1
    text = page(document)
    assert "<script" not in text and text.count("&lt;script&gt;") > 100


def test_a_page_without_a_plan_that_fits_says_so(stand_in):
    hardware = command.Hardware.named("h100x8-ib400")
    small = command.Hardware.from_dict({**json.loads(hardware.to_json()), "memory_bytes": 10**8})
    small.save(stand_in / "small.json")
    arguments = ("--gpus", "16", "--hardware", "small.json", "--report", "plan.html")
    assert run(*CLIP, *arguments) == 1
    assert "No plan fits" in (stand_in / "plan.html").read_text() and not (stand_in / "plan.json").exists()


def test_nothing_fits_is_told_with_what_would_help(stand_in, capsys):
    hardware = command.Hardware.named("h100x8")
    command.Hardware.from_dict({**json.loads(hardware.to_json()), "memory_bytes": 10**8}).save("small.json")
    assert run(*CLIP, "--gpus", "8", "--hardware", "small.json") == 1
    told = capsys.readouterr().out
    assert "nothing fits" in told and "Use more GPUs" in told


def test_one_plan_is_answered_for(stand_in, capsys):
    Plan(dp_shard=2, ulysses=8, sharding="zero3", checkpoint="full", precision="bf16").save("mine.json")
    assert run(*CLIP, *ON, "--fits", "mine.json") == 0
    told = capsys.readouterr().out
    assert told.startswith("fits: ") and " sample(s): dp_shard=2 ulysses=8" in told and "bound by" in told
    assert not (stand_in / "plan.json").exists()


def test_a_mix_of_sizes_and_fixed_fields(stand_in):
    arguments = ("--model", "wan2.1-14b", "--mix", "81x480x832:3", "--mix", "1x720x1280", "--batch", "32")
    assert run(*arguments, *ON, "--set", "checkpoint=full", "--set", "ulysses=4", "--json", "all.json") == 0
    document = json.loads((stand_in / "all.json").read_text())
    assert {each["samples"] for each in document["candidates"]} == {32}
    plans = [Plan.from_dict(each["plan"]) for each in document["candidates"]]
    assert all(plan.checkpoint == "full" and plan.ulysses == 4 for plan in plans)


STEP_FILE = """\
import torch

def model_fn():
    return torch.nn.Linear(3, 5)

def step(model, run):
    assert run.is_reference or run.plan.dp_replicate == run.world_size
    forward = model if run.is_reference else torch.nn.parallel.DistributedDataParallel(model)
    loss = forward(torch.randn(7, 3)).square().mean()
    loss.backward()
    return loss
"""


def test_train_and_profile_take_what_plan_wrote(stand_in, config_file, run):
    fixed = ("--precision", "fp32", "--set", "checkpoint=selective", "--set", "mlp_chunks=4")
    assert run("plan", *CLIP, "--gpus", 1, "--hardware", "h100x8", *fixed, *WRITTEN)[0] == 0
    of_file = ("--config", config_file, "--plan", "plan.json")
    for arguments in (("train", *of_file), ("profile", *of_file, "--num-steps", 1)):
        status, told = run(*arguments)
        assert status == 0 and "plan: checkpoint=selective, mlp_chunks=4" in told
    assert run("plan", *CLIP, *ON, *WRITTEN)[0] == 0
    for name in ("train", "profile"):
        status, told = run(name, *of_file)
        assert status == 2 and "the plan needs 16 ranks" in told


@pytest.mark.prove
def test_verify_takes_what_plan_wrote(stand_in, config_file, run):
    assert run("plan", *CLIP, *ON, "--set", "ulysses=8", "--set", "checkpoint=full", *WRITTEN)[0] == 0
    of_file = ("--config", config_file, "--plan", "plan.json")
    status, told = run("verify", *of_file, "--only", "communication")
    assert status == 0 and "16 ranks" in told and "what is sent is what the plan promises" in told
    # Beside a file of the user's own, whose step applies it; a process loads a name once.
    Plan(dp_replicate=64).save("copies.json")
    (stand_in / "copies.py").write_text(STEP_FILE)
    of_step = ("--step", "copies.py", "--plan", "copies.json")
    status, told = run("verify", *of_step, "--only", "communication", "--json", "found.json")
    assert (
        status == 0 and json.loads((stand_in / "found.json").read_text())["communication"]["world_size"] == 64
    )


@pytest.mark.prove
def test_verify_proves_the_gradients_of_what_plan_wrote(stand_in, config_file, run):
    assert run("plan", *CLIP, *ON, "--set", "ulysses=8", "--set", "checkpoint=full", *WRITTEN)[0] == 0
    status, told = run("verify", "--config", config_file, "--plan", "plan.json", "--only", "gradients")
    assert status == 0 and "ulysses=2" in told and "ulysses=3" in told and "at most 8 run here" in told
    Plan(dp_replicate=64).save("copies.json")
    (stand_in / "copies.py").write_text(STEP_FILE)
    only = ("--only", "gradients", "--max-ranks", 2)
    status, told = run("verify", "--step", "copies.py", "--plan", "copies.json", *only)
    assert status == 0 and "the plan has 64 ranks, and at most 2 run here" in told
    assert "✓ dp_replicate=2" in told


def test_what_stays_on_the_device_has_its_own_kind_and_source(stand_in, capsys):
    def planned(*more):
        fixed = (
            "--set",
            "ulysses=8",
            "--set",
            "checkpoint=full",
            "--json",
            "all.json",
            "--report",
            "plan.html",
        )
        assert run(*CLIP, *ON, *fixed, *more) == 0
        return json.loads((stand_in / "all.json").read_text())

    kinds = ("text encoder", "vae")
    assert not any(kind in each["bytes_by_kind"] for each in planned()["candidates"] for kind in kinds)
    document = planned("--on-device", "text_encoder", "vae")
    named = MODELS["wan2.1-14b"]
    for each in document["candidates"]:
        found = [each["bytes_by_kind"][kind] for kind in kinds]
        assert found == [2 * named.text_encoder["UMT5-XXL"], 2 * named.vae["Wan 2.1 VAE"]]
    assert "UMT5-XXL 5.68 billion" in document["sources"]["text encoder"]
    told = re.search(r"([\d.]+) GiB  text encoder", capsys.readouterr().out)
    assert told is not None and float(told[1]) == pytest.approx(10.58, abs=0.01)
    written = (stand_in / "plan.html").read_text()
    assert "text encoder" in written and "Wan 2.1 VAE 0.13 billion" in written
    # A size that is given wins, and nothing can be given.
    document = planned("--on-device", "text_encoder", "vae", "--vae-gib", "2", "--text-encoder-gib", "0")
    best = document["best"]["bytes_by_kind"]
    assert best["vae"] == 2 * GIB and "text encoder" not in best
    assert document["sources"]["vae"] == "given by --vae-gib"


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    told = capsys.readouterr().out
    for word in ("examples:", "--fits", "how to read the table", "h100x8-ib400", "doctor --calibrate"):
        assert word in told
    assert "  plan " in cli.__doc__


def test_the_frontier_is_what_nothing_beats():
    points = [(1.0, 5.0), (2.0, 3.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0)]
    assert frontier(points) == [(1.0, 5.0), (2.0, 3.0), (4.0, 1.0)]
    assert callable(page)


# ---- real models


@PROVE
def test_a_configured_run_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nfolder = "clips"\nnum_frames = 5\nheight = 16\nwidth = 16\nbatch_size = 2\n[codec]\npatch = 2\n'
        '[text]\nlength = 8\n[model.config]\nnum_attention_heads = 2\nattention_head_dim = 12\nnum_layers = 2\n'
        'ffn_dim = 32\nfreq_dim = 32\nrope_max_seq_len = 32\n'
    )  # fmt: skip
    arguments = ("--config", str(config), "--gpus", "2", "--hardware", "cpux2", "--set", "checkpoint=none")
    assert run(*arguments, *WRITTEN, "--seconds", "0", "--json", "all.json") == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 2 and plan.precision == "fp32"
    document = json.loads((tmp_path / "all.json").read_text())
    assert {each["samples"] for each in document["candidates"]} == {2}
    assert document["best"]["traced"] and document["best"]["bytes_by_kind"]["ema"] > 0


FAMILIES = {
    "MiniMaxH3Transformer3DModel": {},
    "Kandinsky5Transformer3DModel": {"conditions": {"i2v_head": 1.0}},
    "CosmosTransformer3DModel": {"conditions": {"i2v_head": 1.0}},
    "LTX2VideoTransformer3DModel": {},
    "WanTransformer3DModel": {"conditions": {"i2v_head": 1.0}},
    "HunyuanVideo15Transformer3DModel": {},
}


@PROVE
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_its_own_call_is_planned(tmp_path, monkeypatch, name):
    """With sound, with frames that are given, and, where it takes a clip a call, with as many calls as clips."""
    from opensora_accel.training.recipes import RECIPES

    monkeypatch.chdir(tmp_path)
    data = {"folder": "clips", "num_frames": 5, "height": 16, "width": 16}
    found = {}
    for batch in (2, 8):
        values = {
            "data": {**data, "batch_size": batch},
            "codec": {"patch": 2},
            "text": {"length": 8},
            "optim": {"accumulation": 3},
            "model": {"class_name": name, "config": dict(RECIPES[name].tiny)},
            **FAMILIES[name],
        }
        Path("run.json").write_text(json.dumps(values))
        options = (
            "--gpus",
            "2",
            "--hardware",
            "cpux2",
            "--set",
            "checkpoint=none",
            "--set",
            "dp_replicate=2",
        )
        assert run("--config", "run.json", *options, "--seconds", "0", "--json", "all.json") == 0
        document = json.loads(Path("all.json").read_text())
        assert {(each["samples"], each["accumulation"]) for each in document["candidates"]} == {
            (3 * batch, 3)
        }
        assert document["best"]["traced"]
        found[batch] = sum(document["best"]["seconds_by_kind"].values())
    # Four calls of one clip take four times as long; one call of four has its weights and launches once.
    assert found[8] > (2.5 if RECIPES[name].packs else 1.3) * found[2]


def test_encoders_of_a_configured_run_are_counted_while_they_are_there(tmp_path):
    from tests.training.runs import tiny_config
    from tests.training.test_pictures import saved_image_encoder
    from tests.training.test_pretrained import vae
    from tests.training.test_text import saved_encoder

    saved = {
        "vae": vae("AutoencoderKLWan"),
        "text encoder": saved_encoder("t5", tmp_path / "text encoder", tmp_path / "text encoder"),
        "image encoder": saved_image_encoder(tmp_path / "image encoder"),
    }
    saved["vae"].save_pretrained(tmp_path / "vae")
    numbers = {
        kind: sum(t.numel() for t in (*model.parameters(), *model.buffers())) for kind, model in saved.items()
    }

    def counted(**changes):
        sizes = {"data.height": 32, "data.width": 48}
        return job_of(tiny_config(tmp_path, tmp_path / "run", **sizes, **changes)).residents.frozen

    def path(kind):
        return str(tmp_path / kind)

    assert counted() == {}
    with_vae = {"codec": {"path": path("vae"), "dtype": "fp32", "cache": True}}
    assert counted(**with_vae) == {"vae": (4 * numbers["vae"], f"codec.path {path('vae')} in fp32")}
    text = {"path": path("text encoder"), "length": 512}
    assert counted(text=text) == {}, "text.cache lets go of it before the transformer comes"
    held = counted(text=text | {"cache": False})
    assert held == {
        "text encoder": (2 * numbers["text encoder"], f"text.path {path('text encoder')} in bf16")
    }
    pictures = {"image": {"path": path("image encoder")}, "conditions": {"t2v": 1.0, "i2v_head": 1.0}}
    found = counted(**pictures, **with_vae, text=text)
    assert list(found) == ["vae", "image encoder"]
    # Positions are whole numbers, of 8 bytes.
    (ids,) = saved["image encoder"].buffers()
    weights = sum(p.numel() for p in saved["image encoder"].parameters())
    assert found["image encoder"][0] == 4 * weights + 8 * ids.numel()


@pytest.mark.prove
def test_plan_for_a_loop(monkeypatch, capsys):
    import torch
    from diffusers import WanTransformer3DModel

    def build():
        return WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
            ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip

    def inputs(model, dtype):
        return {
            "hidden_states": torch.randn(1, 4, 3, 8, 8, dtype=dtype),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, 8, 16, dtype=dtype),
            "return_dict": False,
        }

    plan = plan_for(
        build, inputs, world_size=1, hardware="h100x8", num_tokens=48, num_heads=2, precision="bf16"
    )
    assert plan.world_size == 1 and "the plan, of" in capsys.readouterr().out


def test_the_trainer_takes_a_plans_file_or_has_one_chosen(tmp_path, monkeypatch):
    from opensora_accel.training import command as training
    from opensora_accel.training import planned

    Plan(ulysses=2, checkpoint="full").save(tmp_path / "plan.json")
    config, _, _ = training.parse(["--plan", str(tmp_path / "plan.json"), "--plan.mlp_chunks", "2"])
    assert config.plan == Plan(ulysses=2, checkpoint="full", mlp_chunks=2)
    started, chosen = [], Plan(dp_replicate=1, mlp_chunks=4)
    forecast = object()
    monkeypatch.setattr(planned, "choose_plan", lambda config: (chosen, forecast))
    monkeypatch.setattr(
        training, "_train", lambda config, *rest: started.append((config.plan, rest[-1])) or 0
    )
    (tmp_path / "run.toml").write_text('plan = "auto"\n')
    for arguments in (["--plan", "auto"], ["--config", str(tmp_path / "run.toml")]):
        assert training.main(arguments) == 0
    assert started == [(chosen, forecast)] * 2


def test_gpu_hours_and_cost_follow_from_the_steps_of_all_samples(stand_in, capsys):
    assert run(*CLIP, *ON, "--json", "all.json", "--samples", "100000", "--price", "2.5", *WRITTEN) == 0
    document = json.loads((stand_in / "all.json").read_text())
    bill, best = document["bill"], document["best"]
    assert bill["steps"] == -(-100_000 // best["samples"])
    for hours, cost, seconds in zip(bill["gpu_hours"], bill["cost"], best["step_time_s"], strict=True):
        assert hours == pytest.approx(bill["steps"] * seconds * 16 / 3600)
        assert cost == pytest.approx(2.5 * hours)
    told = capsys.readouterr().out
    assert f"100,000 samples: {bill['steps']:,} steps, " in told and " GPU-hours, cost " in told
    # Of one plan, without a price.
    assert run(*CLIP, *ON, "--fits", "plan.json", "--brief", "--samples", "100000") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: ") and second.endswith(" GPU-hours")


def test_whether_it_fits_is_one_line_and_a_status(stand_in, capsys):
    assert run(*CLIP, *ON, *WRITTEN, "--brief") == 0
    line, written = capsys.readouterr().out.splitlines()
    assert line.startswith("fits: ") and written.startswith("wrote plan.json, and")
    hardware = Hardware.named("h100x8-ib400")
    Hardware.from_dict({**json.loads(hardware.to_json()), "memory_bytes": 10**8}).save(
        stand_in / "small.json"
    )
    for asked in ((), ("--fits", "plan.json")):
        assert run(*CLIP, "--gpus", "16", "--hardware", "small.json", "--brief", *asked) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("does NOT fit: " if asked else "nothing fits: ")


def test_hardware_is_compared_side_by_side(stand_in, capsys):
    names, prices = ["a100x8-ib200", "b200x8-ib400"], ["b200x8-ib400=5"]
    asked = (*CLIP, "--gpus", "16", "--hardware", *names, "--samples", "1000", "--price", *prices)
    assert run(*asked, "--json", "all.json") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in (*names, "GPU-hours", "cost", "best plan"))
    documents = json.loads((stand_in / "all.json").read_text())
    assert list(documents) == names
    # As it is found alone.
    assert run(*CLIP, "--gpus", "16", "--hardware", names[1], "--json", "one.json") == 0
    assert json.loads((stand_in / "one.json").read_text())["best"] == documents[names[1]]["best"]
    assert documents["a100x8-ib200"]["bill"]["cost"] is None
    cost, hours = (documents["b200x8-ib400"]["bill"][each][0] for each in ("cost", "gpu_hours"))
    assert cost == pytest.approx(5 * hours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--samples", "0"), "--samples is a number of samples, at least 1; got 0"),
        (("--price", "2.5"), "--price is of --samples N"),
        (
            ("--samples", "5", "--price", "0"),
            "--price is what a GPU costs for an hour, 2.5 or h100x8-ib400=2.5",
        ),
        (("--samples", "5", "--price", "a100x8=2"), "each name one of --hardware; got 'a100x8=2'"),
        (("--samples", "5", "--price", "nan"), "got 'nan'"),
        (("--hardware", "h100x8-ib400", "h100x8-ib400"), "--hardware has one of them twice"),
        (
            ("--hardware", "h100x8-ib400", "a100x8-ib200", "--output", "plan.json"),
            "--output is for one --hardware",
        ),
        (("--hardware", "h100x8-ib400", "a100x8-ib200", "--brief"), "--brief is for one --hardware"),
    ],
)
def test_what_cannot_be_asked_together_is_said(stand_in, capsys, arguments, message):
    assert run(*CLIP, *ON, *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_a_run_says_of_clipping_stays():
    options = argparse.Namespace(
        optimizer=None,
        ema=False,
        on_device=[],
        text_encoder_gib=None,
        vae_gib=None,
        model=None,
        config="run.toml",
    )
    for clips in (True, False):
        job = Job((), residents=Residents("adamw-8bit", ema=True, clips=clips))
        assert command._residents(options, job) == job.residents
