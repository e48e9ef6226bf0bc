"""Models built without memory: the values of one device on any mesh, within the memory of what a rank holds."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import shardformer
from opensora_accel import Plan, deferred_init, init_parallel, load_weights, materialize, parallel_states
from opensora_accel.deferred import region_of
from opensora_accel.observe.fakes import fake_world
from opensora_accel.profiler import LiveBytes
from opensora_accel.weights import Stored
from shardformer.policy import find_policy, model_names
from shardformer.tensor_parallel import full_state_dict
from tests.models import wan
from tests.tiers import PROVE, some
from tests.video_models import CASES, outlines


def models():
    """One case for each class."""
    return {type(model).__name__: name for name, model in reversed(outlines().items())}


def pytest_generate_tests(metafunc):
    if metafunc.function is test_a_model_waits_without_memory_and_gets_the_values_of_its_constructor:
        chosen = ("Wan", "HunyuanVideo", "STDiT3, frames given", "MMDiT")
        metafunc.parametrize("name", some(models().values(), *chosen))


class HostBytes(LiveBytes):
    """Live bytes without those of the meta device, which are none."""

    def _count(self, storage):
        if storage.device.type != "meta":
            super()._count(storage)


def wan_model():
    model = wan(torch.float32)
    # 0 in diffusers, which any rank could have.
    nn.init.normal_(model.proj_out.bias)
    return model


def deferred_wan():
    with deferred_init(7):
        return wan_model()


def test_every_model_has_a_case():
    assert {*models(), *ENCODERS} >= set(model_names())


IN_MAKE_TEST = ("LatteTransformer3DModel", 2)
ENCODERS = ("T5EncoderModel", "UMT5EncoderModel")


def make(kind):
    """A small model of a class that has a policy."""
    if kind not in ENCODERS:
        return CASES[models()[kind]].make()
    import transformers

    config = getattr(transformers, kind.replace("EncoderModel", "Config"))(
        d_model=16, d_kv=4, num_heads=4, d_ff=32, num_layers=2, vocab_size=50
    )
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize("kind", ENCODERS)
def test_text_encoders_wait_too(kind):
    with deferred_init(7):
        model = make(kind)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model)
    assert model.shared.weight is model.encoder.embed_tokens.weight
    (out,) = model(input_ids=torch.tensor([[1, 2, 3]]), return_dict=False)
    assert out.isfinite().all() and out.std() > 0


def test_generators_stay_where_they_are(monkeypatch):
    """Those of GPUs too: a loop has seeded them by rank."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("GPUs are seeded"))
    before = torch.get_rng_state()
    with deferred_init(7):
        model = nn.Linear(3, 3)
    assert materialize(model).weight.std() > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_waits_without_memory_and_gets_the_values_of_its_constructor(name):
    with HostBytes() as live, deferred_init(7):
        model = CASES[name].make()
    waiting = live.now_bytes  # of buffers and tables, which have values at once
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.requires_grad)
    one = CASES[name].make()
    largest = max(sum(p.nbytes for p in block.parameters()) for block in shardformer.blocks_of(one))
    total = sum(tensor.nbytes for tensor in one.state_dict().values())
    with live:
        materialize(model)
    # Tiny models have weights outside of blocks that are larger than a block.
    largest = max(largest, *(parameter.nbytes for parameter in one.parameters()))
    assert live.peak_bytes - waiting <= total + largest
    # Norms of 1, biases of 0 and buffers are what the constructor computed, and what is drawn has its spread.
    for (key, found), expected in zip(model.state_dict().items(), one.state_dict().values(), strict=True):
        assert (found.shape, found.dtype, found.is_meta) == (expected.shape, expected.dtype, False), key
    buffers = dict(one.named_buffers())
    assert all(
        torch.equal(b, buffers[key]) for key, b in model.named_buffers() if not key.endswith("y_embedding")
    )


def test_values_are_those_of_the_constructor_in_distribution():
    found, drawn = materialize(deferred_wan()).state_dict(), wan_model().state_dict()
    # Every parameter has draws of its own.
    assert not torch.equal(found["blocks.0.attn1.to_q.weight"], found["blocks.0.attn1.to_k.weight"])
    for key, expected in drawn.items():
        if expected.std() == 0:
            assert torch.equal(found[key], expected), key
        elif expected.numel() > 500:
            assert not torch.equal(found[key], expected)
            assert (
                abs(found[key].std() / expected.std() - 1) < 0.1
                and abs(found[key].mean()) < 0.1 * expected.std()
            )


PLANS = [
    Plan(ulysses=2),
    Plan(sharding="FULL_SHARD"),
    Plan(ulysses=2, sharding="SHARD_GRAD_OP"),
    Plan(ring=3, sharding="FULL_SHARD"),
    Plan(dp_replicate=2, ulysses=2, sharding="HYBRID_SHARD"),
    Plan(dp_shard=4, sharding="FULL_SHARD", precision="bf16"),
    Plan(ulysses=2, sharding="FULL_SHARD", cpu_offload=True),
]


def whole_values(plan, folder=None):
    """Names whose values are not those of one device, and bytes beyond the shards at the peak."""
    one = deferred_wan()
    if folder is not None:
        load_weights(one, folder)
    expected = materialize(one).state_dict()
    init_parallel(plan)
    model = deferred_wan()
    if folder is not None:
        load_weights(model, folder)
    with HostBytes() as live:
        shardformer.shard(model, plan)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    found = full_state_dict(model)
    return [key for key in expected if not torch.equal(found[key], expected[key])], live.peak_bytes - held


@pytest.mark.slow
@pytest.mark.parametrize("plan", some(PLANS, PLANS[4]), ids=str)
@pytest.mark.parametrize("from_files", some([True, False]))
def test_values_are_those_of_one_device_on_every_mesh(ranks, plan, from_files, tmp_path):
    folder = None
    if from_files:
        wan_model().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
        folder = tmp_path
    largest = max(sum(p.nbytes for p in block.parameters()) for block in wan(torch.float32).blocks)
    for different, beyond_bytes in ranks(plan.world_size, whole_values, plan, folder):
        assert different == [] and beyond_bytes <= largest


def strategies(num_ranks):
    """By the names that FSDP's users know, every one that this number of ranks allows."""
    plans = {
        "NO_SHARD": Plan(dp_replicate=num_ranks),
        "SHARD_GRAD_OP": Plan(dp_shard=num_ranks, sharding="SHARD_GRAD_OP"),
        "FULL_SHARD": Plan(dp_shard=num_ranks, sharding="FULL_SHARD"),
    }
    if num_ranks == 4:
        hybrid = {"dp_replicate": 2, "dp_shard": 2}
        plans |= {name: Plan(**hybrid, sharding=name) for name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")}
    return plans


def values_of_every_strategy(kind, num_ranks):
    """Names whose values are not those of one device, and bytes beyond the shards at the peak, by strategy."""
    with deferred_init(7):
        one = make(kind)
    expected = materialize(one).state_dict()
    found = {}
    for name, plan in strategies(num_ranks).items():
        init_parallel(plan)
        with deferred_init(7):
            model = make(kind)
        with HostBytes() as live:
            shardformer.shard(model, plan)
        held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
        values = full_state_dict(model)
        assert values.keys() == expected.keys()
        different = [key for key in expected if not torch.equal(values[key], expected[key])]
        found[name] = different, live.peak_bytes - held
        parallel_states.reset()
    return found


@PROVE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param(kind, num_ranks, marks=() if (kind, num_ranks) == IN_MAKE_TEST else PROVE)
        for kind in model_names()
        for num_ranks in (1, 2, 3, 4)
    ],
)
def test_values_of_every_class_are_those_of_one_device_under_every_strategy(ranks, kind, num_ranks):
    one = make(kind)
    # Tiny models have weights outside of blocks that are larger than a block.
    units = [*shardformer.blocks_of(one), *(nn.ParameterList([each]) for each in one.parameters())]
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in units)
    for found in ranks(num_ranks, values_of_every_strategy, kind, num_ranks):
        assert found.keys() == strategies(num_ranks).keys()
        for different, beyond_bytes in found.values():
            assert different == [] and beyond_bytes <= largest


def test_shards_of_1024_ranks():
    expected = materialize(deferred_wan()).state_dict()
    plan = Plan(dp_shard=256, ulysses=4, sharding="FULL_SHARD")
    for rank in (0, 35, 1023):
        with fake_world(rank, 1024):
            init_parallel(plan, "cpu")
            model = shardformer.shard(deferred_wan(), plan)
            for key, parameter in model.named_parameters():
                whole, local = expected[key], parameter.to_local()
                rows = -(-whole.size(0) // 1024)  # as torch.chunk shares them
                assert torch.equal(local, whole[rows * rank : rows * (rank + 1)]), key


def cut_values(name, precision):
    """Names of shares under tensor parallelism that are not those of the whole model, which bf16 has frozen."""
    with deferred_init(3):
        expected = CASES[name].make()
    expected = materialize(expected).state_dict()
    plan = Plan(dp_shard=2, tp=2, sharding="FULL_SHARD", precision=precision)
    init_parallel(plan)
    with deferred_init(3):
        model = CASES[name].make()
    if precision == "bf16":
        model, _ = shardformer.parallelize(model.requires_grad_(False), plan, torch.device("cpu"))
        expected = {key: value.float().bfloat16() for key, value in expected.items()}
        return [
            key for key, p in full_state_dict(model).items() if not torch.equal(p.bfloat16(), expected[key])
        ]
    found = full_state_dict(shardformer.shard(model, plan))
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_cut_before_they_have_values(ranks, precision):
    name = next(name for name, case in CASES.items() if find_policy(case.make()).tensors)
    assert ranks(4, cut_values, name, precision) == [[]] * 4


class Tied(nn.Module):
    """A tied weight, parameters from one draw, one made from another, and a drawn buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=3)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        both = torch.randn(6, 2)
        self.first, self.second = nn.Parameter(both[:3]), nn.Parameter(both[3:])
        self.twice = nn.Parameter(2 * self.head.bias.detach())
        self.register_buffer("drawn", torch.rand(5))
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.ones(3)))
        self.ones = torch.zeros(3) + 1
        self.num_ones = int(torch.ones(3).sum().item())


def test_what_hangs_together_stays_together():
    with deferred_init(1):
        model = Tied()
    assert model.embed.weight is model.head.weight and model.embed.weight.is_meta
    assert model.ones.tolist() == [1, 1, 1] and model.num_ones == 3 and not model.angles.is_meta
    materialize(model)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight[3].eq(0).all() and model.embed.weight[2].ne(0).all()
    assert torch.equal(model.twice, 2 * model.head.bias)
    with deferred_init(1):
        again = Tied()
    again.second = nn.Parameter(torch.ones(3, 2))  # what has values keeps them
    materialize(again)
    for key in ("first", "twice", "drawn", "embed.weight"):
        assert torch.equal(
            model.get_parameter(key) if key != "drawn" else model.drawn, again.state_dict()[key]
        )
    assert again.second.eq(1).all() and not torch.equal(model.first, model.second)
    with deferred_init(2):
        other = Tied()
    assert not torch.equal(materialize(other).drawn, model.drawn)


def test_everything_goes_to_the_device_of_the_model():
    """Also what nothing was drawn for, such as a rotary table: it was filled on the host when it was built."""
    with deferred_init():
        model = Tied()
    materialize(model, "meta")  # stands for a GPU
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    with deferred_init():
        model = Tied()
    materialize(model, buffer_device="meta")
    assert all(
        tensor.is_meta == (name in dict(model.named_buffers())) for name, tensor in model.state_dict().items()
    )


def test_shards_stay_on_the_host_where_the_mesh_is_of_gpus(parallel_registry, monkeypatch):
    plan = Plan(sharding="zero3")
    init_parallel(plan)
    mesh = parallel_registry.get_mesh("mixed")
    with deferred_init():
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    monkeypatch.setattr(type(mesh), "device_type", "meta")  # stands for a GPU
    materialize(model, "cpu")
    assert not any(parameter.to_local().is_meta for parameter in model.parameters())


def looks_at_draws():
    return nn.Linear(2, 2).weight.sum().item()


def keeps_draws():
    module = nn.Linear(2, 2)
    module.note = torch.randn(3)
    return module


def draws_by_a_generator():
    return nn.init.normal_(torch.empty(3), generator=torch.Generator())


def draws_into_values():
    return torch.arange(3.0).normal_()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (looks_at_draws, "it looks at values that are drawn (aten._local_scalar_dense.default)"),
        (keeps_draws, "Linear.note holds drawn values, and is neither parameter nor buffer"),
        (
            draws_into_values,
            "it draws random numbers (aten.normal_.default) into a tensor that has values already",
        ),
    ],
)
def test_what_cannot_be_deferred_is_refused(build, reason):
    with pytest.raises(ValueError) as caught, deferred_init():
        _model = build()
    assert "this model cannot be built by deferred_init: " + reason in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_each_forward_makes_is_left_to_it():
    with deferred_init(0):
        model = nn.utils.weight_norm(nn.Linear(3, 2))
    materialize(model)
    direction, length, x = model.weight_v, model.weight_g, torch.randn(4, 3)
    expected = x @ (length * direction / direction.norm(dim=1, keepdim=True)).T + model.bias
    torch.testing.assert_close(model(x), expected)
    assert model.weight_g.grad is None and model(x).sum().backward() is None
    assert model.weight_g.grad.abs().sum() > 0


def test_only_the_rows_of_a_shard_are_read(tmp_path, monkeypatch):
    wan_model().save_pretrained(tmp_path)
    read, call = [], Stored.read

    def counted(self, dtype, region=()):
        found = call(self, dtype, region)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(Stored, "read", counted)
    plan = Plan(ulysses=4, sharding="FULL_SHARD")
    with fake_world(1, 4):
        init_parallel(plan, "cpu")
        model = deferred_wan()
        load_weights(model, tmp_path)
        assert read == []
        shardformer.shard(model, plan)
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
        assert sum(read) == held
        load_weights(model, tmp_path)  # once more, into shards that have values
        assert sum(read) == 2 * held


def test_no_more_is_read_of_frozen_weights_that_wait_in_another_dtype(tmp_path, monkeypatch):
    wan_model().save_pretrained(tmp_path)
    expected = {name: p.bfloat16() for name, p in wan_model().named_parameters()}
    read, call = 0, Stored.read

    def counted(self, dtype, region=()):
        nonlocal read
        found = call(self, dtype, region)
        read += found.numel()
        return found

    monkeypatch.setattr(Stored, "read", counted)
    with fake_world(1, 4):
        plan = Plan(ulysses=4, sharding="FULL_SHARD", precision="bf16")
        init_parallel(plan, "cpu")
        model = deferred_wan().requires_grad_(False)
        load_weights(model, tmp_path)
        model, _ = shardformer.parallelize(model, plan, torch.device("cpu"))
        assert read == sum(parameter.to_local().numel() for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            region = region_of(parameter.shape, parameter.device_mesh, parameter.placements, 1)
            assert torch.equal(parameter.to_local().bfloat16(), expected[name][region]), name


def test_weights_of_another_model_are_refused(tmp_path):
    model = wan_model()
    with pytest.raises(FileNotFoundError, match="give the folder of the transformer itself"):
        load_weights(model, tmp_path)
    weights = model.state_dict()
    del weights["proj_out.bias"]
    save_file(weights | {"extra": torch.ones(1)}, tmp_path / "model.safetensors")
    for target in (model, deferred_wan()):
        with pytest.raises(ValueError, match=r"missing \['proj_out.bias'\], unknown \['extra'\]"):
            load_weights(target, tmp_path)
    save_file(weights | {"proj_out.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"proj_out.bias is \[3\] in .* and \[64\] in this Wan"):
        load_weights(deferred_wan(), tmp_path)


def test_the_index_names_files_of_its_own_folder(tmp_path):
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"weight": "/elsewhere/a.safetensors", "bias": "a.safetensors"}}
    (tmp_path / "a.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    model = nn.Linear(2, 2)
    load_weights(model, tmp_path)
    assert model.weight.eq(1).all()


def test_a_folder_with_half_of_its_files_or_two_variants_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="files model-…-of-00002 are missing"):
        load_weights(model, tmp_path)
    save_file({"bias": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    load_weights(model, tmp_path)
    assert model.weight.eq(1).all() and model.bias.eq(1).all()
    save_file({"bias": torch.zeros(2)}, tmp_path / "model.fp16.safetensors")
    with pytest.raises(
        ValueError, match=r"bias lies in model-00002-of-00002\.safetensors and in model\.fp16\.safetensors"
    ):
        load_weights(model, tmp_path)


def test_a_folder_with_two_sets_of_weights_is_refused(tmp_path):
    for variant in ("", ".fp16"):
        name = f"model{variant}.safetensors"
        save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / name)
        index = {"weight_map": {"weight": name, "bias": name}}
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"2 sets of weights: model\.fp16\.safetensors\.index\.json, model\.saf"
    ):
        load_weights(nn.Linear(2, 2), tmp_path)
