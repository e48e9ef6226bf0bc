"""A finished run, trained once in the session and copied for each test."""

import shutil

import pytest

from tests.training.runs import tiny_config


def train(config):
    from opensora_accel.training.loop import Trainer

    Trainer(config).train()


@pytest.fixture(scope="session")
def finished_run(ranks, clips, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    ranks(1, train, tiny_config(clips, folder, steps=4, save_every=2))
    return folder


@pytest.fixture
def output(finished_run, tmp_path):
    """The folder of the run of `config_file`, with step_000002 and step_000004."""
    return shutil.copytree(finished_run, tmp_path / "run")
