"""The example of docs/integrations/accelerate.md, as it stands there, against the same steps in one process."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opensora_accel import Plan, init_parallel
from opensora_accel.integrations.accelerate import data_parallel_dataloader, gather_for_metrics
from opensora_accel.observe.on_cpu import launcher_environment
from opensora_accel.precision import lift_casts
from tests.integrations.pages import ROOT, programs, replaced
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE, relative_errors

EXAMPLE, FSDP = programs("accelerate.md")

(ACCELERATOR,) = re.findall(r"accelerator = .*\n", EXAMPLE)


# As it stands, under both launchers


def launchers():
    place = ["--num_machines", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    return {
        "torchrun": [
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
        ],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *place, *plain],
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(script, *launcher):
    command = [sys.executable, *(["-m", *launcher] if launcher else []), str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]


@PROVE
def test_the_example_runs_under_both_launchers_as_in_one_process(tmp_path):
    rel = RELATIVE[torch.float32]
    script, single = tmp_path / "train.py", tmp_path / "single.py"
    script.write_text(EXAMPLE)
    single.write_text(replaced(EXAMPLE, ("Plan(ulysses=2)", "Plan()")))
    expected = losses(single)
    assert len(expected) == 8 and len(set(expected)) == 8
    for name, launcher in launchers().items():
        assert losses(script, *launcher) == pytest.approx(expected, rel=rel), name


# In fp64: every parameter after three steps

CLIP = 0.1
# A gradient that is rounding alone would move a parameter of AdamW as far as any other.
IN_DOUBLE = (
    ("in range(16)]", "in range(24)]; clips = [(a.double(), b.double(), n) for a, b, n in clips]"),
    ("plan = Plan(ulysses=2)", "lift(model.double()); before = copies(model); plan = PLAN"),
    ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"),
    ("            accelerator.clip", "            norms.append(accelerator.clip"),
    ("norm_(model.parameters(), 1.0)", "norm_(model.parameters(), CLIP))"),
    ("    accelerator.print", "    seen.append(numbers); accelerator.print"),
)  # fmt: skip


def updates(plan, source):
    """What the example changes in each parameter, and the samples that this rank saw."""

    def copies(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    seen, norms = [], []
    scope = {"PLAN": plan, "CLIP": CLIP, "lift": lift_casts, "copies": copies, "seen": seen, "norms": norms}
    run = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    with launcher_environment(run), contextlib.redirect_stdout(None):
        exec(compile(source, "docs/integrations/accelerate.md", "exec"), scope)
        after = dict(scope["accelerator"].unwrap_model(scope["model"]).named_parameters())
        kinds = {type(parameter) for parameter in after.values()}
    assert min(norms) > CLIP, "gradients are clipped"
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in after.items()}
    moved = {name: full[name].detach() - value for name, value in scope["before"].items()}
    return moved, [numbers.tolist() for numbers in seen], kinds


def one_process(accumulate):
    source = replaced(EXAMPLE, *IN_DOUBLE, ("accumulation_steps=2", f"accumulation_steps={accumulate}"))
    return updates(Plan(), source)


HYBRID = "__import__('accelerate').ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)"


def distributed(plan, fsdp):
    source = replaced(EXAMPLE, *IN_DOUBLE)
    if fsdp:
        source = replaced(source, (ACCELERATOR, FSDP))
    if fsdp == "HSDP":
        source = replaced(source, ("fsdp_plugin=fsdp", "fsdp_plugin=fsdp, parallelism_config=" + HYBRID))
    with fsdp_on_cpu() if fsdp else contextlib.nullcontext():
        return updates(plan, source)


@contextlib.contextmanager
def fsdp_on_cpu():
    """accelerate takes an FSDP plugin where its ranks have an accelerator: here it does on CPUs, too."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            assert self.distributed_type == DistributedType.MULTI_CPU
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


@pytest.mark.parametrize(
    ("plan", "fsdp"),
    [
        (Plan(ulysses=2), None),
        pytest.param(Plan(ulysses=2), "FSDP2", marks=PROVE),
        pytest.param(Plan(ring=2, checkpoint="full"), "FSDP2", marks=PROVE),
        pytest.param(Plan(dp_replicate=2, ulysses=2), None, marks=PROVE),
        pytest.param(Plan(dp_replicate=2, ulysses=2), "FSDP2", marks=PROVE),
        (Plan(dp_replicate=2, ulysses=2), "HSDP"),
    ],
    ids=str,
)
def test_parameters_move_as_in_one_process(ranks, plan, fsdp):
    ((expected, order, _kinds),) = ranks(1, one_process, 2 * plan.data)
    found = ranks(plan.world_size, distributed, plan, fsdp)
    for moved, _seen, kinds in found:
        assert kinds == ({DTensor} if fsdp else {torch.nn.Parameter})
        errors = relative_errors(moved, expected)
        assert (
            any(update.any() for update in expected.values())
            and max(errors.values()) < RELATIVE[torch.float64]
        ), max(errors, key=errors.get)
    # Every data rank its own samples, in the order of one process; those that share a sample the same.
    seen = [batches for _moved, batches, _kinds in found]
    assert [batch for batches in zip(*seen[:: plan.sequence], strict=True) for batch in batches] == order
    assert all(batches == seen[rank - rank % plan.sequence] for rank, batches in enumerate(seen))


# Batches


@contextlib.contextmanager
def accelerator_of(plan, **options):
    from accelerate import Accelerator

    init_parallel(plan)
    run = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    with launcher_environment(run):
        yield Accelerator(cpu=True, **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def dealt(plan, kind, **options):
    """Two epochs of samples, and what a worker of the loader would draw, where every rank has a seed of its own."""
    from accelerate import DataLoaderConfiguration

    torch.manual_seed(dist.get_rank())
    with accelerator_of(plan, dataloader_config=DataLoaderConfiguration(**options)) as accelerator:
        dataset = Stream() if kind == "iterable" else TensorDataset(torch.arange(12))
        own = torch.Generator().manual_seed(dist.get_rank()) if kind == "shuffled by its own" else None
        plain = DataLoader(dataset, batch_size=2, shuffle=kind.startswith("shuffled"), generator=own)
        loader = data_parallel_dataloader(accelerator, plain)
        assert accelerator._dataloaders == [loader] and accelerator.prepare(loader) is loader
        epochs = [
            [x for batch in loader for x in (batch if kind == "iterable" else batch[0]).tolist()]
            for _ in "ab"
        ]
        return epochs, loader.generator.initial_seed()


@pytest.mark.parametrize("plan", some([Plan(dp_replicate=2, ulysses=2), Plan(ulysses=2)]), ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("in order", {}),
        ("shuffled", {}),
        ("shuffled by its own", {}),
        ("shuffled", {"use_seedable_sampler": True}),
        ("shuffled", {"split_batches": True}),
        ("iterable", {}),
    ],
    ids=str,
)
def test_ranks_that_share_a_sample_get_it_and_others_another(ranks, plan, kind, options):
    found = ranks(plan.world_size, partial(dealt, **options), plan, kind)
    for rank, dealt_here in enumerate(found):
        assert dealt_here == found[rank - rank % plan.sequence], "within a sequence group"
    firsts = found[:: plan.sequence]
    if kind != "shuffled by its own":  # one generator for both
        assert len({seed for _epochs, seed in firsts}) == plan.data, "workers of data ranks draw differently"
    for epoch in range(2):
        assert sorted(x for epochs, _seed in firsts for x in epochs[epoch]) == list(range(12))
    epochs = firsts[0][0]
    assert (epochs[0] != epochs[1]) == kind.startswith("shuffled")


def dealt_by_prepare():
    with accelerator_of(Plan(ulysses=2)) as accelerator:
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=2))
        return [x for (batch,) in loader for x in batch.tolist()]


def test_prepare_alone_deals_other_samples_to_every_rank(ranks):
    """Why there is a function of ours: the day that this fails, it may go."""
    first, second = ranks(2, dealt_by_prepare)
    assert not set(first) & set(second)


def synchronised():
    """At which of five batches gradients are averaged, of which two are accumulated."""
    with accelerator_of(Plan(ulysses=2), gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        plain = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1)
        at = []
        for _ in data_parallel_dataloader(accelerator, plain):
            with accelerator.accumulate(model):
                at.append(accelerator.sync_gradients)
        return at


def test_accumulation_ends_with_the_loader(ranks):
    assert ranks(2, synchronised) == [[False, True, False, True, True]] * 2


def metrics(plan):
    """Of an epoch of seven samples, which two data ranks cannot share evenly: ours, and accelerate's own."""
    with accelerator_of(plan) as accelerator:
        loader = data_parallel_dataloader(
            accelerator, DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
        )
        ours, theirs = [], []
        for (numbers,) in loader:
            ours += gather_for_metrics(accelerator, {"number": numbers})["number"].tolist()
            theirs += accelerator.gather_for_metrics(numbers).tolist()
        return ours, theirs


@pytest.mark.parametrize(
    "plan", some([Plan(dp_replicate=2, ulysses=2), Plan(ulysses=2), Plan(dp_replicate=2)]), ids=str
)
def test_metrics_have_every_sample_once(ranks, plan):
    for ours, theirs in ranks(plan.world_size, metrics, plan):
        assert ours == list(range(7))
        assert (theirs == ours) == (plan.sequence == 1), "the day that this fails, ours may go"


def refused(plan, kind):
    from accelerate import Accelerator, DataLoaderConfiguration

    options = (
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)} if kind == "dispatch" else {}
    )
    with accelerator_of(plan, **options) as accelerator:
        if kind == "cpu":
            accelerator.state._reset_state(reset_partial_state=True)
            accelerator = Accelerator()
        with pytest.raises(ValueError) as error:
            data_parallel_dataloader(accelerator, DataLoader(range(4)))
    return str(error.value)


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (Plan(ulysses=2), "dispatch", "use dispatch_batches=False"),
        (Plan(tp=2), "tp", "over all 2 ranks, but data × sequence are 1"),
        pytest.param(
            Plan(ulysses=2),
            "cpu",
            "accelerate sees 1 of the 2 ranks",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="no CPU ranks"),
        ),
    ],
)
def test_what_would_go_wrong_silently_is_refused(ranks, plan, kind, message):
    assert all(message in said for said in ranks(2, refused, plan, kind))


def test_accelerate_is_imported_on_use_only():
    code = "import sys, opensora_accel.integrations.accelerate; assert 'accelerate' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
