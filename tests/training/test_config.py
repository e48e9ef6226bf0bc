"""Configurations: read as data, refused in words that help, shown where they differ."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from opensora_accel.plan import Plan
from opensora_accel.training.config import TrainConfig, config_from_dict, differences, load_config
from opensora_accel.training.sections import DataConfig, OptimConfig
from tests.test_layers import ROOT


def written(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_is_valid_and_survives_json(path, tmp_path):
    config = load_config(path)
    assert load_config(written(tmp_path, json.dumps(dataclasses.asdict(config)), "saved.json")) == config


def test_toml_and_defaults(tmp_path):
    text = "steps = 7\n[optim]\nlr = 1\nbetas = [0.8, 0.9]\n"
    text += '[plan]\nulysses = 2\ncheckpoint = "full"\noffload = "auto"\n'
    config = load_config(written(tmp_path, text + "[model.config]\nnum_layers = 2\n"))
    assert config.steps == 7 and config.optim.lr == 1.0 and config.optim.betas == (0.8, 0.9)
    assert config.plan == Plan(ulysses=2, checkpoint="full", offload="auto")
    assert config.model.config == {"num_layers": 2} and config.data == TrainConfig().data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "there is no option 'stepz'; did you mean 'steps'?"),
        ("[plan]\nulyses = 2", "there is no option 'plan.ulyses'; did you mean 'plan.ulysses'?"),
        ("lr = 0.1", "there is no option 'lr'; did you mean 'optim.lr'?"),
        ("[data]\nbatchsize = 2", "did you mean 'data.batch_size'?"),
        ("steps = 0", "steps must be greater than or equal to 1; got 0"),
        ('steps = "many"', "steps must be a valid integer; got 'many'"),
        ("steps = true", "steps must be a valid integer; got True"),
        ("[optim]\nbetas = [0.9]", "optim.betas.1 field required; got [0.9]"),
        (
            '[optim]\nschedule = "linear"',
            "optim.schedule must be 'constant', 'cosine' or 'free'; got 'linear'",
        ),
        ("plan = 3", "plan must be an object; got 3"),
        ("memory_target_gib = 8", "is 0.0; set it to auto, or leave memory_target_gib out"),
        ("[plan]\noffload = 0.5", 'checkpoint is none; set checkpoint="full"'),
        (
            "[flow]\nshift = -1",
            "flow.shift must be greater than 0 or must be 'auto', 'ltx' or 'open-sora-1.2'; got -1",
        ),
        ("steps = ", "cannot be read as toml"),
        ("[data]\nnum_frames = 0", "data.num_frames must be greater than or equal to 1; got 0"),
        ("[data]\nnum_workers = 1000000", "data.num_workers must be less than or equal to 256; got 1000000"),
        ("[optim]\nbetas = [0.9, 1.0]", "optim.betas.1 must be less than 1; got 1.0"),
        ("[optim]\neps = 0", "optim.eps must be greater than 0; got 0"),
        ("[optim]\nweight_decay = -1", "optim.weight_decay must be greater than or equal to 0; got -1"),
        (
            "[optim]\naccumulation = 1000000000",
            "optim.accumulation must be less than or equal to 100000; got 1000000000",
        ),
        ("[text]\nlength = 1000000000", "text.length must be less than or equal to 4096; got 1000000000"),
        ("[text]\nwidth = 1000000000", "text.width must be less than or equal to 8192"),
        ("[flow]\nsample_steps = 1000000000", "flow.sample_steps must be less than or equal to 10000"),
        ("seed = -1", "seed must be greater than or equal to 0; got -1"),
        ("seed = 9223372036854775808", "seed must be less than or equal to 9223372036854775807"),
    ],
)
def test_a_wrong_file_is_refused_with_the_remedy(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(num_frames=0), "num_frames must be greater than or equal to 1; got 0"),
        (lambda: OptimConfig(lr=math.nan), "lr must be a finite number; got nan"),
        (lambda: dataclasses.replace(TrainConfig(), steps=True), "steps must be a valid integer; got True"),
        (lambda: TrainConfig(stepz=3), "there is no option 'stepz'; did you mean 'steps'?"),
        (lambda: TrainConfig(plan=3), "plan must be an instance of Plan; got 3"),
    ],
    ids=["bound", "not finite", "type", "name", "table"],
)
def test_a_config_made_in_code_is_checked(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def float_options(cls=TrainConfig, prefix=""):
    """The full name of every option that takes a fraction, and whether it takes a pair of them."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from float_options(hint, f"{prefix}{name}.")
        elif hint is float or float in get_args(hint) or get_origin(hint) is tuple:
            yield prefix + name, get_origin(hint) is tuple


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "is_pair"), list(float_options()))
def test_no_option_takes_a_number_that_is_not_finite(tmp_path, name, is_pair, bad):
    tables = name.split(".")
    values = [0.9, bad] if is_pair else bad
    for key in reversed(tables):
        values = {key: values}
    with pytest.raises(ValueError, match=tables[-1]):
        load_config(written(tmp_path, json.dumps(values), "run.json"))


def test_every_float_option_is_tried():
    names = {name for name, _ in float_options()}
    assert {"optim.lr", "optim.betas", "flow.shift", "plan.offload", "memory_target_gib"} <= names and len(
        names
    ) > 10


def test_the_table_of_the_model_takes_finite_numbers_only(tmp_path):
    with pytest.raises(ValueError, match=r"model\.config\.eps must be a finite number; got nan"):
        load_config(written(tmp_path, "[model.config]\neps = nan"))
    with pytest.raises(ValueError, match=r"model\.config\.patch_size must be a finite number; got inf"):
        load_config(written(tmp_path, "[model.config]\npatch_size = [1, inf, 2]"))


def test_a_file_is_data_and_never_executed(tmp_path):
    marker = tmp_path / "executed"
    path = written(tmp_path, f"output = \"{{__import__('pathlib').Path('{marker}').touch()}}\"")
    assert "__import__" in load_config(path).output and not marker.exists()


def test_a_missing_file_names_its_neighbours(tmp_path):
    written(tmp_path, "", "other.toml")
    with pytest.raises(FileNotFoundError, match=r"there is no config file .*; .* has other\.toml"):
        load_config(tmp_path / "run.toml")


def test_differences_have_full_names():
    before = TrainConfig()
    after = dataclasses.replace(before, steps=5, plan=Plan(ulysses=2))
    after = dataclasses.replace(after, model=dataclasses.replace(after.model, config={"num_layers": 3}))
    assert differences(before, after) == {
        "steps": (1000, 5),
        "plan.ulysses": (1, 2),
        "model.config.num_layers": (None, 3),
    }
    assert (
        differences(before, config_from_dict(json.loads(json.dumps(dataclasses.asdict(before))), "x")) == {}
    )


def test_the_table_of_other_trainers_names_what_is_there():
    """Options of this trainer, and tests that show them."""
    section = (
        (ROOT / "docs" / "training.md")
        .read_text(encoding="utf-8")
        .partition("## Coming from another trainer")[2]
    )
    rows = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| \w", line)]
    assert len(rows) > 20 and {len(row) for row in rows} == {6}
    for *_, options, test in rows:
        for option in re.findall(r"`([\w.]+)`", options):
            functools.reduce(getattr, option.split("."), TrainConfig())
        path, _, name = test.strip(" `").partition("::")
        source = (Path(__file__).parent / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.M), test
