"""Named groups: who is in them, what the setters of other libraries lead to, and what is refused."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.communications.sizes import exchange_integers
from opensora_accel.observe.fakes import fake_world


def members(group):
    return dist.get_process_group_ranks(group)


def groups_of(plan):
    mesh = init_parallel(plan)
    names = ("data", "sequence", "mixed", "tensor", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
    found = {name: members(parallel_states.get_parallel_group(name)) for name in names}
    assert mesh.shape == plan.degrees
    assert members(parallel_states.get_data_parallel_group()) == found["data"]
    assert members(parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)) == found["mixed"]
    assert members(parallel_states.get_sequence_parallel_group()) == found["sequence"]
    assert members(parallel_states.get_tensor_parallel_group()) == found["tensor"]
    assert members(parallel_states.get_mesh("sequence").get_group()) == found["sequence"]
    return found


def test_groups_follow_the_mesh_outermost_first(ranks):
    found = ranks(4, groups_of, Plan(dp_replicate=2, ulysses=2))
    assert [f["data"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["sequence"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["mixed"] for f in found] == [[0, 1, 2, 3]] * 4
    found = ranks(4, groups_of, Plan(ring=2, ulysses=2))
    assert [f["ring"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["ulysses"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = ranks(4, groups_of, Plan(dp_shard=2, tp=2, sharding="zero3"))
    assert [f["tensor"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["mixed"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def groups_in_an_order_of_ones_own():
    mesh = init_parallel(
        Plan(dp_replicate=2, ulysses=2), ranks=torch.tensor([[0, 2], [1, 3]]).view(2, 1, 1, 2, 1)
    )
    with pytest.raises(ValueError, match="already called"):
        init_parallel(Plan(ulysses=4))
    names = ("data", "sequence", "mixed")
    assert mesh["ulysses"].mesh.tolist() == members(mesh.get_group("ulysses"))
    return [members(parallel_states.get_parallel_group(name)) for name in names]


def test_somebody_elses_layout_of_the_ranks_is_taken(ranks):
    found = ranks(4, groups_in_an_order_of_ones_own)
    assert found[0] == [[0, 1], [0, 2], [0, 1, 2, 3]] and found[3] == [[2, 3], [1, 3], [0, 1, 2, 3]]


def layouts_that_cannot_be():
    with pytest.raises(ValueError, match=r"wants each of 2 ranks once in \(1, 1, 1, 2, 1\); got \[0, 0\]"):
        init_parallel(Plan(ulysses=2), ranks=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"ranks have to rise along ulysses.*got \[1, 0\]"):
        init_parallel(Plan(ulysses=2), ranks=torch.tensor([1, 0]).view(1, 1, 1, 2, 1))


def test_a_layout_that_groups_cannot_have_is_refused(ranks):
    ranks(2, layouts_that_cannot_be)


def misfit():
    with pytest.raises(ValueError) as caught:
        init_parallel(Plan(ulysses=2))
    return str(caught.value)


def test_a_plan_that_does_not_fit_fails_on_every_rank(ranks):
    messages = ranks(3, misfit)
    assert len(set(messages)) == 1 and "ulysses=3" in messages[0]


def groups_made_elsewhere():
    rank = dist.get_rank()
    data = [dist.new_group(members_) for members_ in ([0, 2], [1, 3])][rank % 2]
    sequence = [dist.new_group(members_) for members_ in ([0, 1], [2, 3])][rank // 2]
    parallel_states.set_data_parallel_group(data)
    assert parallel_states.get_sequence_parallel_group() is None
    assert parallel_states.get_data_parallel_group(get_mixed_dp_pg=True) is data
    parallel_states.set_sequence_parallel_group(sequence)
    assert parallel_states.get_sequence_parallel_group() is sequence
    # data 2 × sequence 2 fills the world of 4, so the mixed group is certain.
    assert members(parallel_states.get_data_parallel_group(True)) == [0, 1, 2, 3]

    parallel_states.reset()
    half = [dist.new_group(members_) for members_ in ([0, 1], [2, 3])][rank // 2]
    parallel_states.set_data_parallel_group(dist.new_group([rank], use_local_synchronization=True))
    parallel_states.set_sequence_parallel_group(half)
    parallel_states.set_tensor_parallel_group(data)
    with pytest.raises(ValueError, match="set_mixed_parallel_group"):
        parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
    parallel_states.set_mixed_parallel_group(half)
    assert parallel_states.get_data_parallel_group(get_mixed_dp_pg=True) is half
    assert parallel_states.get_tensor_parallel_group() is data


def test_groups_made_elsewhere(ranks):
    ranks(4, groups_made_elsewhere)


def test_a_plain_process_is_a_world_of_one(parallel_registry, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environment = dict(os.environ)
    init_parallel(Plan())
    assert dist.get_world_size() == 1
    assert parallel_states.get_sequence_parallel_group().size() == 1
    assert dict(os.environ) == environment
    with pytest.raises(ValueError, match="reset"):
        init_parallel(Plan())


def test_before_init_the_remedy_is_named(parallel_registry):
    with pytest.raises(ValueError, match=r"init_parallel\(plan\)"):
        parallel_states.get_parallel_group("ring")
    with pytest.raises(ValueError, match="the groups are data, sequence, mixed"):
        parallel_states.get_parallel_group("rings")
    with pytest.raises(ValueError, match=r"init_parallel\(plan\)"):
        parallel_states.get_mesh()
    assert parallel_states.get_sequence_parallel_group() is None


def test_a_plan_for_two_ranks_in_a_plain_process(parallel_registry, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        init_parallel(Plan(ulysses=2))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("rank", "world_size"), [("5", "1"), ("1", "1"), ("-1", "2"), ("first", "2"), ("0", "0")]
)
def test_a_rank_that_cannot_be_is_refused_at_once(parallel_registry, monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"RANK={rank} of WORLD_SIZE={world_size}, but ranks count from 0"):
        init_parallel(Plan())


@pytest.mark.slow
def test_ranks_that_start_again_see_nothing_of_the_start_before():
    """torchrun keeps its store over a restart, and counts restarts on each node by itself."""
    kept, found = dist.HashStore(), {}

    def start(rank):
        store = parallel_states._store_of_this_start(kept, rank, 3)
        found[rank] = store
        store.set(f"address/{rank}", f"of start {number}")

    for number in range(3):
        threads = [threading.Thread(target=start, args=(rank,)) for rank in (2, 0, 1)]
        for thread in threads:
            thread.start()
            thread.join(timeout=0.2)  # the first ones to come find what the start before has left
        for thread in threads:
            thread.join(timeout=20)
        assert sorted(found) == [0, 1, 2]
        for store in found.values():
            assert [store.get(f"address/{rank}").decode() for rank in range(3)] == [f"of start {number}"] * 3
        found.clear()


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr(parallel_states, "_START_TIMEOUT_S", 0.2)
    with pytest.raises(ValueError, match=r"rank 0 waited 0 s for rank 1, 2 to start"):
        parallel_states._store_of_this_start(dist.HashStore(), 0, 3)
    with pytest.raises(ValueError, match=r"rank 1 waited 0 s for rank 0 to start"):
        parallel_states._store_of_this_start(dist.HashStore(), 1, 3)


def sizes_over_a_device_group():
    """Sizes that ranks exchange over a group without a host backend, as one of NCCL alone; groups made on the way."""
    init_parallel(Plan(ulysses=3))
    group = dist.new_group(backend="cuda:gloo")
    before = len(dist.distributed_c10d._world.pg_map)
    sizes = [exchange_integers([dist.get_rank(), number], group) for number in (7, 8)]
    return sizes, len(dist.distributed_c10d._world.pg_map) - before


def test_sizes_of_a_device_group_travel_on_the_host(ranks):
    for sizes, num_groups in ranks(3, sizes_over_a_device_group):
        assert sizes == [[(0, 7), (1, 7), (2, 7)], [(0, 8), (1, 8), (2, 8)]]
        assert num_groups == 1, "one, for all exchanges"


@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 16, "dp_shard": 8, "ulysses": 8}, {"dp_shard": 128, "ring": 2, "ulysses": 4}]
)
def test_a_rank_makes_its_own_groups_and_none_twice(degrees, monkeypatch):
    """On 1,024 simulated ranks; torch's mesh would have each rank wait for the making of 2,504 and 2,960."""
    made = []
    new_group = dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **options: made.append(ranks) or new_group(ranks, **options)
    )
    with fake_world(5, 1024):
        init_parallel(Plan(sharding="zero3", **degrees))
        groups = list(dist.distributed_c10d._world.pg_map)
        ranks = [tuple(members(group)) for group in groups]
    assert len(set(ranks)) == len(ranks), "no two of the same ranks"
    assert [len(each) for each in ranks].count(1) == 1, "one for all axes of one rank"
    assert len(made) == len(groups) - 1 == 5
    sockets = sum(len(each) - 1 for each in ranks)
    print(f"{len(groups)} groups, {sockets} connections of a host backend")
    assert sockets < 1200


@pytest.mark.parametrize(
    "gpus, ranks_here, device", [(2, 2, "cuda"), (8, 2, "cuda"), (0, 2, "cpu"), (1, 2, "cpu"), (1, 1, "cuda")]
)
def test_ranks_take_the_gpus_where_there_are_enough(gpus, ranks_here, device, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    assert parallel_states._device_type() == device
    # Who has GPUs and does not get them is told why.
    told = "running on the CPU" in caplog.text and f"start at most {gpus}" in caplog.text
    assert told == (0 < gpus < ranks_here)


@pytest.mark.parametrize("kind", ["data", "sequence", "tensor", "mixed"])
def test_a_name_is_no_group(kind, parallel_registry):
    """It would be taken, and found wrong in the first collective."""
    register = getattr(parallel_states, f"set_{kind}_parallel_group")
    with pytest.raises(
        TypeError, match=rf"the {kind} group is a torch.distributed.ProcessGroup.*got 'ulysses'"
    ):
        register("ulysses")


@pytest.mark.parametrize(("backend", "is_aborted"), [("gloo", False), ("cpu:gloo,cuda:nccl", True)])
def test_after_an_error_nccl_is_not_waited_for(parallel_registry, monkeypatch, backend, is_aborted):
    """Destroyed, its groups wait for collectives that a rank will never come to."""
    init_parallel(Plan())
    told, destroy = [], dist.destroy_process_group
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: told.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: told.append("destroy"))
    parallel_states.reset(destroy_process_group=True, abort=True)
    assert told == ["abort" if is_aborted else "destroy"]
    destroy()
