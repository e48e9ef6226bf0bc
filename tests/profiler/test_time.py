"""Where a step's time went: which spans there are, how they lie, and that the step itself is what it was."""

import gzip
import itertools
import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import Plan, init_parallel, regions
from opensora_accel.integrations.accelerate import end_steps_at_log
from opensora_accel.observe.gpus import peak_of
from opensora_accel.observe.kinds import BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.observe.on_cpu import launcher_environment
from opensora_accel.profiler import profile, region
from opensora_accel.profiler.clock import HostClock, agree
from opensora_accel.profiler.records import rank_files, read_rank
from tests.profiler.timelines import one_second_step, share_of_step, shortened
from tests.tiers import some
from tests.video_models import CASES


def steps_of(folder):
    path = folder / "rank_00000.jsonl"
    return list(read_rank(path)[1]) if path.exists() and path.stat().st_size else []


def train(name, plan, folder=None, num_steps=2):
    """Steps of a sharded model; its parameters after them."""
    case = CASES[name]
    model = shardformer.shard(case.make(), plan)
    wrapped = DistributedDataParallel(model) if plan.sharding == "none" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        out = wrapped(**case.inputs())
        loss = (out if torch.is_tensor(out) else out[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if folder is None:
        for _ in range(num_steps):
            step()
    else:
        with profile(model, plan, folder) as run:
            for _ in range(num_steps):
                run.step(loss=step(), tokens=75)
    dist.barrier()
    return [parameter.detach() for parameter in model.parameters()]


def profiled(name, plan, folder):
    init_parallel(plan)
    before = dist.Work.wait
    expected, found = train(name, plan), train(name, plan, folder)
    assert dist.Work.wait is before and regions.region("x") is regions.region("y")
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def nested_or_apart(spans):
    return all(
        a.end_s <= b.start_s or b.end_s <= a.start_s or a.start_s <= b.start_s <= b.end_s <= a.end_s
        for a, b in itertools.combinations(spans, 2)
    )


@pytest.mark.parametrize(
    "name",
    some(["Wan", "HunyuanVideo", "LTX-Video", "CogVideoX", "Latte", "MMDiT", "STDiT3"], "Wan", "MMDiT"),
)
@pytest.mark.parametrize("checkpoint", some(["full", "none", "selective"], "full", "none"))
def test_spans_of_a_step(ranks, tmp_path, name, checkpoint):
    plan = Plan(ulysses=2, checkpoint=checkpoint, offload=0.0 if checkpoint == "none" else 1.0)
    assert all(ranks(2, profiled, name, plan, tmp_path)), "a profiled step is the same to the last bit"
    for rank in (0, 1):
        run, steps = read_rank(tmp_path / f"rank_{rank:05d}.jsonl")
        steps = list(steps)
        assert run.plan["ulysses"] == 2 and run.coordinates["ulysses"] == rank
        assert [step.step for step in steps] == [1, 2] and steps[0].end_s == steps[1].start_s
        assert all(step.metrics["tokens"] == 75 and step.metrics["loss"] > 0 for step in steps)
        for step in steps:
            spans = step.spans
            assert nested_or_apart(spans)
            assert all(step.start_s <= span.start_s <= span.end_s <= step.end_s for span in spans)
            named = [(span.region, span.phase) for span in spans]
            num_blocks = run.model["num_blocks"]
            assert named.count(("block", FORWARD)) == named.count(("block", BACKWARD)) == num_blocks
            assert named.count(("attention", FORWARD)) == named.count(("attention", BACKWARD)) > 0
            recomputed = {region: named.count((region, RECOMPUTE)) for region in ("block", "attention")}
            if checkpoint == "none":
                assert not any(recomputed.values())
            else:
                assert recomputed == {"block": num_blocks, "attention": named.count(("attention", FORWARD))}
                assert named.count(("copy out", "")) and named.count(("copy in", ""))
            assert named.count(("optimizer", "")) == 1
            forward = [span.name for span in spans if (span.region, span.phase) == ("block", FORWARD)]
            backward = [span.name for span in spans if (span.region, span.phase) == ("block", BACKWARD)]
            assert backward == forward[::-1]


def microbatches(folder):
    """Two forwards before the first backward, and a region of the loop's own."""
    init_parallel(Plan())
    case = CASES["Wan"]
    model = case.make()
    with profile(model, folder=folder) as run:
        with region("data", "clips"):
            inputs = case.inputs()
        outs = [model(**inputs, return_dict=False)[0] for _ in range(2)]
        for out in outs:
            out.square().mean().backward()
        run.step()
    return model


def test_microbatches_in_flight_and_regions_of_a_loop(ranks, tmp_path):
    ranks(1, microbatches, tmp_path)
    (step,) = steps_of(tmp_path)
    assert nested_or_apart(step.spans)
    named = [(span.region, span.name, span.phase) for span in step.spans]
    assert named[0] == ("data", "clips", "")
    assert named.count(("block", "blocks.0", FORWARD)) == named.count(("block", "blocks.0", BACKWARD)) == 2


def test_a_model_without_a_policy(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])[0])
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with profile(model, folder=tmp_path, first_step=7) as run:
        x = torch.randn(3, 4)
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()
        run.step()
    (step,) = steps_of(tmp_path)
    assert step.step == 7
    assert {(span.name, span.phase) for span in step.spans} >= {("layers.0", FORWARD), ("layers.1", BACKWARD)}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_one_profiler_at_a_time_and_none_left_after_an_error(tmp_path):
    model = nn.Linear(2, 2)
    first, second = (profile(model, folder=tmp_path / name) for name in ("first", "second"))
    with pytest.raises(ValueError, match="a profiler runs already"), first, second:
        raise AssertionError
    with pytest.raises(KeyError), profile(model, folder=tmp_path) as run:
        model(torch.randn(1, 2)).sum().backward()
        run.step(loss=1.0)
        raise KeyError
    assert [step.metrics for step in steps_of(tmp_path)] == [{"loss": 1.0}]
    assert regions.region("x") is regions.region("y")


def test_a_trace_has_the_regions_names_and_times(tmp_path):
    case = CASES["Wan"]
    model = case.make()
    with profile(model, folder=tmp_path, trace_steps=[2]) as run:
        for _ in range(3):
            with region("data", "clips"):
                inputs = case.inputs()
            model(**inputs, return_dict=False)[0].square().mean().backward()
            run.step()
    (path,) = tmp_path.glob("trace_*")
    assert path.name == "trace_rank_00000_step_00002.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = {event["name"]: event["dur"] / 1e6 for event in events if event.get("cat") == "user_annotation"}
    spans = steps_of(tmp_path)[1].spans
    names = {" ".join(filter(None, (span.region, span.phase, span.name))): span for span in spans}
    assert names.keys() <= found.keys() and "data clips" in names and "block backward blocks.1" in names
    for name, span in names.items():
        assert abs(found[name] - (span.end_s - span.start_s)) < 0.05, name


def test_memory_is_followed_in_the_steps_that_are_asked_for(tmp_path):
    case = CASES["Wan"]
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(model, folder=tmp_path, memory_steps=[2], optimizer=optimizer) as run:
        for _ in range(3):
            model(**case.inputs(), return_dict=False)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    first, second, third = steps_of(tmp_path)
    assert not first.memory and not third.memory
    assert all(second.start_s <= sample.time_s <= second.end_s for sample in second.memory)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for sample in second.memory:
        assert sample.bytes_by_kind["parameters"] == num_bytes
        assert sample.bytes_by_kind["optimizer state"] >= 2 * num_bytes
    assert max(sample.bytes_by_kind["gradients"] for sample in second.memory) == num_bytes


def test_memory_and_operations_of_the_same_step_and_an_earlier_record(tmp_path):
    """Both watch every operator of the first step; whichever ends first must not end the other."""
    case = CASES["Wan"]
    model = case.make()
    (tmp_path / "rank_00007.jsonl").write_text("of a run that had more ranks")
    found = []
    for memory_steps in ([1], []):
        with profile(model, folder=tmp_path, memory_steps=memory_steps) as run:
            for _ in range(2):
                model(**case.inputs(), return_dict=False)[0].square().mean().backward()
                run.step()
        (path,) = rank_files(tmp_path)
        record, steps = read_rank(path)
        found.append((record.model_flops, record.hardware_flops))
        assert [bool(step.memory) for step in steps] == [bool(memory_steps), False]
    assert found[0] == found[1] and found[0][0] > 0
    with pytest.raises(KeyError), profile(model, folder=tmp_path, memory_steps=[1]):
        model(**case.inputs())
        raise KeyError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def logged(folder):
    """Two steps of a loop that logs with accelerate; what its own tracker saw on this rank."""
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    seen = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def log(self, values, step=None, **_):
            seen.append((values, step))

    init_parallel(Plan(dp_replicate=2))
    model = nn.Linear(2, 2)
    place = SimpleNamespace(rank=dist.get_rank(), world_size=2)
    with launcher_environment(place), profile(model, folder=folder) as run:
        accelerator = Accelerator(cpu=True, log_with=[Tracker()])
        accelerator.init_trackers("training")
        end_steps_at_log(accelerator, run)
        for number in range(2):
            accelerator.backward(model(torch.randn(1, 2)).sum())
            accelerator.log({"loss": float(number), "note": "text"}, step=number)
        accelerator.end_training()
    return seen


def test_logging_with_accelerate_ends_steps_on_every_rank(ranks, tmp_path):
    seen = ranks(2, logged, tmp_path)
    assert seen == [[({"loss": number, "note": "text"}, number) for number in range(2)], []]
    for path in rank_files(tmp_path):
        assert [step.metrics for step in read_rank(path)[1]] == [{"loss": 0}, {"loss": 1}]


class LateClock(HostClock):
    """As a GPU's: a mark is not known until the device has come there, which a test decides."""

    def __init__(self):
        super().__init__()
        self.reached = float("-inf")
        self.num_early_reads = 0

    def is_done(self, mark):
        return mark <= self.reached

    def seconds(self, mark):
        self.num_early_reads += mark > self.reached
        return super().seconds(mark)


def test_a_step_is_written_when_the_device_has_come_there(tmp_path, monkeypatch):
    clock = LateClock()
    monkeypatch.setattr("opensora_accel.profiler.time.clock_for", lambda _device: clock)
    model = nn.Linear(2, 2)
    with profile(model, folder=tmp_path) as run:
        for number in range(3):
            model(torch.randn(1, 2)).sum().backward()
            run.step(loss=float(number))
            assert len(steps_of(tmp_path)) == (0, 0, 2)[number] and clock.num_early_reads == 0
            if number == 1:
                clock.reached = time.perf_counter()
    assert [step.metrics["loss"] for step in steps_of(tmp_path)] == [0, 1, 2]


def skewed(offset_s):
    """Ranks whose clocks differ by a lot: how far the same instant lies apart once they agree."""
    init_parallel(Plan(dp_replicate=2))
    own = time.perf_counter
    time.perf_counter = lambda: own() + offset_s * dist.get_rank()
    try:
        clock = HostClock()
        time.sleep(0.1 * dist.get_rank())  # they do not begin at once either
        error_s = agree(clock)
        dist.barrier()
        return clock.seconds(clock.mark()), error_s
    finally:
        time.perf_counter = own


def test_ranks_count_from_the_same_instant(ranks):
    (first, _), (second, error_s) = ranks(2, skewed, 1000.0)
    # An instant is the same to within what a barrier takes to let go, on a machine with other work.
    assert abs(first - second) < 0.1 and 0 <= error_s < 0.1


def test_all_ranks_write(ranks, tmp_path):
    assert all(ranks(2, profiled, "Wan", Plan(dp_replicate=2), tmp_path))
    assert len(rank_files(tmp_path)) == 2


def exchanging(folder):
    """Steps that send far more than they compute."""
    init_parallel(Plan(dp_replicate=2))
    told, logger = [], logging.getLogger("opensora_accel.profiler.time")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        model, message = nn.Linear(2, 2), torch.ones(1 << 20)
        with profile(model, folder=folder) as run:
            for _ in range(14):
                model(torch.ones(1, 2)).sum().backward()
                dist.all_reduce(message)
                run.step()
    finally:
        logger.removeHandler(handler)
    return told


def test_a_network_that_is_the_limit_is_told_once(ranks, tmp_path):
    (message,), none = ranks(2, exchanging, tmp_path)
    assert none == [] and "communication is 0." in message and "over 10 steps, under 3 : 1" in message
    assert "use fewer ring ranks" in message


def test_peaks_of_known_devices(monkeypatch):
    cuda = torch.device("cuda")
    for name, bf16 in {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA T4": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert peak_of(cuda, "bf16")[0] == bf16
        assert (peak_of(cuda, "fp32")[0] is None) == (bf16 is None) and peak_of(cuda, "fp64") == (None, "")
    assert peak_of(torch.device("cpu"), "bf16") == (None, "")


@pytest.mark.alone
def test_what_a_profiler_costs(tmp_path):
    """Processor time of steps with and without one, in turns; a step of 2,400 tokens is a short one."""
    model, inputs = one_second_step()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs, run=None):
        begin = time.process_time()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step(loss=1.0)
        return time.process_time() - begin

    def turns(inputs, number):
        for turn in range(number):
            with profile(model, folder=tmp_path / str(turn), count_flops=False) as run:
                with_it = step(inputs, run)
            yield with_it, step(inputs)

    step(inputs)
    assert share_of_step(list(turns(shortened(inputs), 40)), list(turns(inputs, 9))) < 0.01


def flops(plan, folder):
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)
    with profile(model, plan, folder) as run:
        for _ in range(2):
            model(**case.inputs(), return_dict=False)[0].square().mean().backward()
            run.step()
    record, steps = read_rank(folder / f"rank_{dist.get_rank():05d}.jsonl")
    assert len(list(steps)) == 2
    return record.model_flops, record.hardware_flops


def test_ranks_share_the_operations_of_one_device(ranks, tmp_path):
    ((whole, computed),) = ranks(1, flops, Plan(), tmp_path / "one")
    plans = Plan(ulysses=2), Plan(ring=2), Plan(ring=2, checkpoint="full")
    ulysses, ring, recomputed = (ranks(2, flops, plan, tmp_path / str(i)) for i, plan in enumerate(plans))
    assert whole == computed > 0
    # Text is treated on every rank. A ring and Ulysses do the same products, by other operators.
    assert whole < sum(model for model, _ in ulysses) < 2 * whole
    assert sum(model for model, _ in ring) == sum(model for model, _ in ulysses)
    assert all(model == hardware for model, hardware in (*ulysses, *ring))
    # A recomputation is a forward, at most half of a backward.
    assert [model for model, _ in recomputed] == [model for model, _ in ring]
    assert all(0.15 < hardware / model - 1 < 0.34 for model, hardware in recomputed)
