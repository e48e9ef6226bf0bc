"""Every kind of call is recorded with the bytes of theory: on real ranks, and on a backend that sends nothing."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from opensora_accel.attention import ring_attention
from opensora_accel.communications import all_to_all
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.observe.fakes import OtherRanks, fake_world
from opensora_accel.observe.kinds import AFTER, BACKWARD, FORWARD, RECOMPUTE

# torch 2.13 wants other names for collectives that torch 2.11 knows only under these.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

P, SIZE = 3, 12
BYTES = SIZE * 4
"""Of one tensor of every call, fp32."""


def data():
    return torch.ones(SIZE)


def parts(tensor):
    return list(tensor.chunk(P))


def exchange_uneven():
    rank, splits = dist.get_rank(), [2, 3, 4]
    received = torch.empty(P * splits[rank])
    dist.all_to_all_single(received, torch.ones(sum(splits)), [splits[rank]] * P, splits)


def shift(send, receive):
    rank = dist.get_rank()
    works = [send(data(), (rank + 1) % P), receive(torch.empty(SIZE), (rank - 1) % P)]
    for work in works:
        work.wait()


def batched():
    rank = dist.get_rank()
    ops = [
        dist.P2POp(dist.isend, data(), (rank + 1) % P),
        dist.P2POp(dist.irecv, data(), (rank - 1) % P),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def one_message():
    if dist.get_rank() == 1:
        dist.send(data(), 2)
    elif dist.get_rank() == 2:
        dist.recv(data(), 1)


def redistributed(*placements):
    mesh = init_device_mesh("cpu", (P,))
    tensor = DTensor.from_local(torch.ones(SIZE, 2), mesh, placements[:1])
    tensor.redistribute(mesh, placements[1:]).to_local().sum().item()


def operation_on_terms():
    """It is not linear: the terms are added up first, within the DTensor's own dispatch."""
    DTensor.from_local(data(), init_device_mesh("cpu", (P,)), [Partial()]).relu()


def rooted(function, root, *tensors):
    """`function(tensor, list, root)`: only the root gives a list."""
    function(data()[: SIZE // P], parts(data()) if dist.get_rank() == root else None, root)


CALLS = {
    # name: (what is called, the kind, bytes that each rank sends, the peer of each rank)
    "all_reduce": (lambda: dist.all_reduce(data()), "all-reduce", [2 * BYTES * 2 // 3] * P, None),
    "all_reduce by name": (
        lambda: functional.all_reduce(data(), "sum", dist.group.WORLD).wait(),
        "all-reduce",
        [2 * BYTES * 2 // 3] * P,
        None,
    ),
    "all_gather": (
        lambda: dist.all_gather([data() for _ in range(P)], data()),
        "all-gather",
        [2 * BYTES] * P,
        None,
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(torch.empty(P * SIZE), data()),
        "all-gather",
        [2 * BYTES] * P,
        None,
    ),
    "all_gather by name": (
        lambda: functional.all_gather_tensor(data(), 0, dist.group.WORLD).wait(),
        "all-gather",
        [2 * BYTES] * P,
        None,
    ),
    "all_gather of a DTensor": (
        lambda: redistributed(Shard(0), Replicate()),
        "all-gather",
        [2 * 2 * BYTES] * P,
        None,
    ),
    "all_reduce inside of a DTensor": (operation_on_terms, "all-reduce", [2 * BYTES * 2 // 3] * P, None),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.empty(SIZE // P), parts(data())),
        "reduce-scatter",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(torch.empty(SIZE // P), data()),
        "reduce-scatter",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "reduce_scatter by name": (
        lambda: functional.reduce_scatter_tensor(data(), "sum", 0, dist.group.WORLD).wait(),
        "reduce-scatter",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(data(), data()),
        "all-to-all",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "all_to_all_single, uneven": (exchange_uneven, "all-to-all", [4 * 7, 4 * 6, 4 * 5], None),
    "all_to_all": (
        lambda: dist.all_to_all(parts(data()), parts(data())),
        "all-to-all",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "all_to_all by name": (
        lambda: functional.all_to_all_single(data(), None, None, dist.group.WORLD).wait(),
        "all-to-all",
        [BYTES * 2 // 3] * P,
        None,
    ),
    "broadcast": (lambda: dist.broadcast(data(), 1), "broadcast", [0, 2 * BYTES, 0], [1] * P),
    "reduce": (lambda: dist.reduce(data(), 1), "reduce", [BYTES, 0, BYTES], [1] * P),
    "gather": (
        lambda: rooted(dist.gather, 1),
        "gather",
        [BYTES // 3, 0, BYTES // 3],
        [1] * P,
    ),
    "scatter": (lambda: rooted(dist.scatter, 1), "scatter", [0, BYTES * 2 // 3, 0], [1] * P),
    "isend": (lambda: shift(dist.isend, dist.irecv), "send", [BYTES] * P, [1, 2, 0]),
    "batch_isend_irecv": (batched, "send", [BYTES] * P, [1, 2, 0]),
    "send": (one_message, "send", [0, BYTES, 0], [None, 2, None]),
    "barrier": (dist.barrier, "barrier", [0] * P, None),
}


def recorded(name):
    with CollectiveRecorder() as recorder:
        CALLS[name][0]()
    return recorder.calls


def all_recorded():
    return {name: recorded(name) for name in CALLS}


@pytest.fixture(scope="module")
def on_gloo(ranks):
    return ranks(P, all_recorded)


@pytest.fixture(scope="module")
def on_the_fake_backend():
    found = []
    for rank in range(P):
        with fake_world(rank, P):
            found.append(all_recorded())
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["on_gloo", "on_the_fake_backend"])
def test_a_call_sends_the_bytes_of_theory(request, backend, name):
    _, kind, sent_bytes, peers = CALLS[name]
    for rank, found in enumerate(request.getfixturevalue(backend)):
        calls = found[name]
        assert sum(call.sent_bytes for call in calls) == sent_bytes[rank]
        assert {call.kind for call in calls} <= ({kind, "recv"} if kind == "send" else {kind})
        assert all(call.group == tuple(range(P)) for call in calls)
        of_kind = [call for call in calls if call.kind == kind]
        assert len(of_kind) == (0 if kind == "send" and not sent_bytes[rank] else 1)
        assert [call.peer for call in of_kind] == (
            [peers[rank]] if peers and of_kind else [None] * len(of_kind)
        )
        assert all("test_record.py:" in call.source for call in calls)


def messages():
    with CollectiveRecorder() as recorder:
        batched()
        one_message()
    return [(call.kind, call.peer, call.input_bytes, call.sent_bytes) for call in recorder.calls]


def test_a_receive_names_its_sender_and_sends_nothing(ranks):
    found = ranks(P, messages)
    assert found[2] == [("send", 0, BYTES, BYTES), ("recv", 1, BYTES, 0), ("recv", 1, BYTES, 0)]


def in_a_subgroup():
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    with CollectiveRecorder() as recorder:
        dist.broadcast(data(), 2, group=group)
        dist.all_reduce(data(), group=group)
        other = 2 - dist.get_rank()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, data(), other, group), dist.P2POp(dist.irecv, data(), other, group)]
        )
        for work in works:
            work.wait()
    return [(call.kind, call.group, call.peer, call.sent_bytes) for call in recorder.calls]


def test_ranks_are_global_in_a_subgroup(ranks):
    found = ranks(P, in_a_subgroup)
    assert found[0] == [
        ("broadcast", (0, 2), 2, 0),
        ("all-reduce", (0, 2), None, BYTES),
        ("send", (0, 2), 2, BYTES),
        ("recv", (0, 2), 2, 0),
    ]
    assert found[2][0] == ("broadcast", (0, 2), 2, BYTES)


def test_an_operator_that_is_not_known_is_not_left_out():
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("telepathy(Tensor x) -> Tensor")
    library.impl("telepathy", lambda x: x.clone(), "CPU")
    with CollectiveRecorder() as recorder:
        torch.ops.c10d.telepathy(data())
    (call,) = recorder.calls
    assert (call.kind, call.operator, call.input_bytes, call.sent_bytes) == (
        "unknown",
        "c10d::telepathy",
        BYTES,
        0,
    )


def test_functional_messages_in_one_operator():
    with fake_world(1, P), CollectiveRecorder() as recorder:
        name = dist.group.WORLD.group_name
        torch.ops._c10d_functional.batch_p2p_ops(["isend", "irecv"], [2, 0], [0, 0], [data(), data()], name)
    assert [(c.kind, c.peer, c.sent_bytes) for c in recorder.calls] == [("send", 2, BYTES), ("recv", 0, 0)]


# ---- phases and lines


def doubled_elsewhere(x):
    return all_to_all(2 * x, None, 0, 1).square()


def in_every_phase():
    weight = torch.ones(4, 4, requires_grad=True)
    layer = nn.Identity()
    layer.forward = doubled_elsewhere
    with CollectiveRecorder() as recorder:
        checkpoint(layer, weight, use_reentrant=False).sum().backward()
        dist.all_reduce(weight.grad)
    return [call for call in recorder.calls if call.dtype != "int64"]


def test_the_phases_of_a_checkpointed_step(ranks):
    calls = ranks(2, in_every_phase)[0]
    assert [call.phase for call in calls] == [FORWARD, RECOMPUTE, BACKWARD, AFTER]


def test_lines_of_the_toolkit_and_of_its_caller(ranks):
    forward, recompute, backward, after = (call.where for call in ranks(2, in_every_phase)[0])
    for where in (forward, recompute, backward):
        assert where.source.startswith("opensora_accel/communications/alltoall.py:")
        # What the exchange gathers along is before what it scatters in one direction, and behind it in the other.
        assert where.source.endswith(
            " in _exchange_to_rows" if where is backward else " in _exchange_to_columns"
        )
    assert forward.caller.endswith("in doubled_elsewhere")
    assert recompute.caller.endswith("in doubled_elsewhere")
    assert backward.caller.endswith("in in_every_phase")
    assert "test_record.py" in after.source and after.caller == after.source and not after.via


# ---- what stands between a step and its calls


def by_ddp(bucket_mb):
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    wrapped(torch.ones(2, 40)).sum().backward()  # the first backward settles the buckets
    with CollectiveRecorder(dict(model.named_parameters())) as recorder:
        wrapped(torch.ones(2, 40)).sum().backward()
    return [
        (call.kind, call.num_elements, call.phase, call.where.via, call.gradients) for call in recorder.calls
    ]


@pytest.mark.parametrize(("bucket_mb", "num_buckets"), [(25, 1), (0.001, 2)])
def test_the_reducer_of_ddp_is_seen_with_the_gradients_it_carries(ranks, bucket_mb, num_buckets):
    calls = [call for call in ranks(2, by_ddp, bucket_mb)[0] if call[0] == "all-reduce"]
    assert len(calls) >= num_buckets
    assert sum(call[1] for call in calls) == 40 * 50 + 50 + 50 * 60 + 60
    assert {call[2:4] for call in calls} == {(BACKWARD, "DDP (reducer, C++)")}
    assert sorted(name for call in calls for name in call[4]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def by_hand(flatten):
    model = nn.Linear(4, 3)
    with CollectiveRecorder(dict(model.named_parameters())) as recorder:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        dist.all_reduce(loss.detach())
        if flatten:
            dist.all_reduce(torch.cat([p.grad.view(-1) for p in model.parameters()]) / 2)
        else:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
    return [call.gradients for call in recorder.calls]


@pytest.mark.parametrize(
    ("flatten", "expected"),
    [(False, [(), ("weight",), ("bias",)]), (True, [(), ("weight", "bias")])],
    ids=["one by one", "flattened"],
)
def test_gradients_are_followed_into_the_call_that_averages_them(ranks, flatten, expected):
    assert ranks(2, by_hand, flatten)[0] == expected


def by_fsdp():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with CollectiveRecorder() as recorder:
        model(torch.ones(2, 5)).sum().backward()
    return [(call.kind, call.phase, call.num_elements, call.where.via) for call in recorder.calls]


def test_fsdp2_gathers_and_reduces_padded_parameters(ranks):
    first, second = (5 + 1) * 8, (7 + 1) * 4  # 7 and 3 rows on 2 ranks
    gather, reduce = "FSDP2 (foreach_all_gather)", "FSDP2 (foreach_reduce)"
    assert ranks(2, by_fsdp)[0] == [
        ("all-gather", FORWARD, first // 2, gather),
        ("all-gather", FORWARD, second // 2, gather),
        ("all-gather", BACKWARD, second // 2, gather),
        ("all-gather", BACKWARD, first // 2, gather),
        ("reduce-scatter", BACKWARD, second, reduce),
        ("reduce-scatter", BACKWARD, first, reduce),
    ]


def round_a_ring():
    shape = (2, 5, 3, 4)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with CollectiveRecorder() as recorder:
        out = ring_attention(q, k, v, dist.group.WORLD, splits=[5] * P, kv_splits=[5] * P)
        out.sum().backward()
    return q.nbytes, [(call.phase, call.kind, call.peer, call.sent_bytes) for call in recorder.calls]


def test_the_sends_inside_of_ring_attention(ranks):
    for rank, (size, calls) in enumerate(ranks(P, round_a_ring)):
        sends = [call for call in calls if call[1] == "send"]
        assert {call[2] for call in sends} == {(rank + 1) % P}
        assert [call[0] for call in sends] == [FORWARD] * 2 + [BACKWARD] * 4
        assert sum(call[3] for call in sends) == 6 * (P - 1) * size


def test_ddp_runs_on_the_fake_backend():
    with fake_world(3, 8), OtherRanks(), CollectiveRecorder() as recorder:
        model = DistributedDataParallel(nn.Linear(4, 3))
        model(torch.ones(2, 4)).sum().backward()
    assert [call.kind for call in recorder.calls][-1] == "all-reduce"
    assert model.module.weight.grad is not None


def averaged_while_recorded():
    tensor = torch.full((3,), float(dist.get_rank()))
    with CollectiveRecorder():
        dist.all_reduce(tensor)
    return tensor.tolist()


def test_recording_changes_no_result(ranks):
    assert ranks(P, averaged_while_recorded) == [[3.0] * 3] * P
