"""The corners of training loops: the gradients there are those of torch's plain checkpointing, bit for bit."""

import copy
import functools
import gc
import logging
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from opensora_accel import checkpoint as ck
from tests.checkpoint.steps import Block, assert_identical, baseline, blocks, data, gradients, run

MANAGER = ck.GLOBAL_ACTIVATION_MANAGER


@pytest.fixture(autouse=True)
def arena(device):
    MANAGER.setup_arena(1 << 20)


VIEWS = {
    "offset": lambda x: x[:, 1:],
    "gaps": lambda x: x[:, :, ::2],
    "chunk of the last dim": lambda x: x.chunk(2, -1)[1],
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "expanded inside": lambda x: x[:, :1].expand(-1, 4, -1),
    "expanded with gaps": lambda x: x[:1, :, ::2].expand(3, -1, -1),
    "windows": lambda x: x.unfold(2, 8, 4).flatten(1, 2),
    "overlapping": lambda x: x.as_strided((2, 5, 8), (40, 4, 1)),
    "one element": lambda x: x[1:, 4:, 15:],
    "none": lambda x: x[:, :0],
}


class Recorder(nn.Module):
    """Notes the strides that it is given."""

    def __init__(self, width, device):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.strides = nn.Linear(width, 6).to(device), []

    def forward(self, x):
        self.strides.append(x.stride())
        return self.linear(x).sin()


@pytest.mark.parametrize("view", VIEWS)
def test_views_come_back_as_they_were(view, device):
    results = []
    for call in (lambda f, x: torch_checkpoint(f, x, use_reentrant=False), ck.checkpoint):
        (x, _) = data()
        module = Recorder(VIEWS[view](x).size(-1), device)
        call(module, VIEWS[view](x * 1)).square().sum().backward()
        results.append([x.grad, *[p.grad for p in module.parameters()]])
        assert len(module.strides) == 2 and module.strides[0] == module.strides[1]
    assert_identical(results[1], results[0])
    assert MANAGER.counters.moved == (view != "none")


def test_a_broadcast_tensor_moves_once_its_size():
    x = torch.randn(1, 5, 16, device=data()[0].device, requires_grad=True)
    ck.checkpoint(Block().to(x.device), (x * 1).expand(8, -1, -1)).sum().backward()
    assert MANAGER.counters.moved_bytes == 5 * 16 * 4


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_retain_graph_recomputes_twice(mode):
    model, inputs = blocks(), data()
    ck.checkpoint_blocks(model, mode, 1.0)
    loss = run(model, inputs).square().sum()
    loss.backward(retain_graph=True)
    once = gradients(model, inputs)
    loss.backward()
    for a, b in zip(gradients(model, inputs), once, strict=True):
        assert torch.equal(a, 2 * b)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("depth", [2, 3])
def test_one_forward_one_backward(mode, depth):
    """A pipeline's order: `depth` microbatches in flight, the oldest ends first."""

    def train(offloaded):
        model, pairs = blocks(), [data(seed=seed) for seed in range(6)]
        if offloaded:
            ck.checkpoint_blocks(model, mode, 1.0)
        in_flight = []
        for pair in pairs:
            in_flight.append(run(model, pair).square().sum())
            if len(in_flight) == depth:
                in_flight.pop(0).backward()
        while in_flight:
            in_flight.pop(0).backward()
        return gradients(model, [tensor for pair in pairs for tensor in pair])

    assert_identical(train(True), train(False))
    assert MANAGER.counters.moved == 6 * 3 * (3 if mode == "selective" else 1)


class Nested(nn.Module):
    """A checkpoint inside of a block, as models bring them along."""

    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.inner = Block(), Block(), inner

    def forward(self, hidden, timestep):
        hidden = self.first(hidden, timestep)
        return self.inner(self.second, hidden * 1, timestep)


NESTED = {
    "ours in ours": (ck.checkpoint, ck.checkpoint),
    "torch's in ours": (ck.checkpoint, lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False)),
    "ours in torch's": (lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False), ck.checkpoint),
}


@pytest.mark.parametrize("names", NESTED)
def test_nested_checkpoints(names, device, caplog):
    outer, inner = NESTED[names]

    def train(outer, inner):
        model, (x, t) = nn.ModuleList([Nested(inner) for _ in range(3)]).to(device), data()
        torch.manual_seed(7)
        hidden = x * 1
        for block in model:
            hidden = outer(block, hidden, t)
        hidden.square().sum().backward()
        return gradients(model, (x, t))

    def plain(f, *args):
        return f(*args)

    found = train(outer, inner)
    assert MANAGER.counters.moved == (0 if names == "ours in torch's" else 3), (
        "the inner inputs are recomputed"
    )
    assert MANAGER.counters.prefetched == (0 if names == "ours in torch's" else 2)
    assert_identical(found, train(plain, plain))
    assert not caplog.records


def test_other_saved_tensor_hooks_go_first(caplog):
    model, inputs = blocks(), data()
    with torch.autograd.graph.save_on_cpu(), caplog.at_level(logging.WARNING):
        run(model, inputs, ck.checkpoint).float().square().sum().backward()
    assert MANAGER.counters.moved == 0
    assert [record.message for record in caplog.records] == [
        "nothing is offloaded inside of other saved-tensor hooks (save_on_cpu.__init__.<locals>.pack_to_cpu); "
        "leave them (save_on_cpu, for one) or set offload=0"
    ]
    assert_identical(gradients(model, inputs), baseline())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden):
        result = self.linear(hidden.sin())
        hidden.add_(1)
        return result


def test_a_block_that_changes_its_input_is_refused():
    """Plain checkpointing finds it in backward; the copy out would race with the change."""
    x, block = data()[0], InPlace().to(data()[0].device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch_checkpoint(block, x * 1, use_reentrant=False).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \[2, 5, 16\] in place .* \(hidden = hidden \+ x,"):
        ck.checkpoint(block, x * 1)


def test_a_kept_tensor_that_changes_later_is_found():
    """Hooks switch autograd's own check off: without one of ours the gradient would be silently wrong."""
    model, (x, t) = blocks(1), data()
    t = t * 1
    out = ck.checkpoint(model[0], x * 1, t)
    with torch.no_grad():
        t.add_(1)
    with pytest.raises(RuntimeError, match="changed in place: it is at version 1, 0 was expected"):
        out.sum().backward()
    MANAGER.setup_arena(8)
    hidden = x * 1
    out = ck.checkpoint(model[0], hidden)
    hidden.detach().add_(1)
    assert MANAGER.counters.kept == 1, "the arena is full"
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_moved_tensor_may_change_afterwards():
    model, inputs = blocks(), data()

    def call(block, hidden, t):
        out = ck.checkpoint(block, hidden, t)
        with torch.no_grad():
            hidden.fill_(float("nan"))
        return out

    run(model, inputs, call).float().square().sum().backward()
    assert_identical(gradients(model, inputs), baseline())


def test_eval_with_gradients_is_checkpointed_too():
    """Eval switches dropout off; gradients, and so recomputation, are another matter."""
    results = []
    for offloaded in (False, True):
        model, inputs = blocks().eval(), data()
        if offloaded:
            ck.checkpoint_blocks(model, "full", 1.0)
        run(model, inputs).sum().backward()
        results.append(gradients(model, inputs))
    assert MANAGER.counters.moved == 3
    assert_identical(results[1], results[0])


def test_what_a_hook_holds_of_a_fetched_block_is_not_overwritten():
    """A feature loss keeps block inputs, also the recomputed ones: their slots are in use, memory of its own serves."""
    model, inputs, held = blocks(6), data(), []
    ck.checkpoint_blocks(model, "full", 1.0)

    def hold(_block, args):
        held.append((args[0].detach(), args[0].detach().clone()))

    for block in model:
        block.qkv.register_forward_pre_hook(hold)
    run(model, inputs).float().square().sum().backward()
    assert len(held) == 12
    assert all(torch.equal(now, then) for now, then in held)
    assert_identical(gradients(model, inputs), baseline(num=6))


class Half(Block):
    def forward(self, hidden, timestep=None):
        return super().forward(hidden.bfloat16().float(), timestep).bfloat16()


def test_blocks_of_two_dtypes():
    results = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([Block(), Half(), Block(), Half()]).to(data()[0].device)
        inputs = data()
        if offloaded:
            ck.checkpoint_blocks(model, "selective", 1.0)
        run(
            model, inputs, lambda block, x, t: block(x.float() if type(block) is Block else x, t)
        ).float().sum().backward()
        results.append(gradients(model, inputs))
    assert_identical(results[1], results[0])


class TwoStreams(nn.Module):
    """As in MMDiT: text and video both flow from block to block, and a block may write on its copy of either."""

    def __init__(self):
        super().__init__()
        self.video, self.text = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden, encoder_hidden, *, gain=1.0):
        mean = encoder_hidden.mean(1, keepdim=True)
        return hidden + self.video(hidden + mean).sin() * gain, encoder_hidden + self.text(
            encoder_hidden
        ).cos()


def test_two_boundary_tensors_share_a_slot():
    results = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        hidden, text = data()
        model = nn.ModuleList([TwoStreams() for _ in range(4)]).to(hidden.device)
        inputs = hidden, text
        if offloaded:
            ck.checkpoint_blocks(model, "full", 1.0, boundary=("hidden", "encoder_hidden"))
        hidden, text = hidden * 1, text * 1
        for block in model:
            hidden, text = block(hidden, text, gain=0.5)
        (hidden.sum() + text.square().sum()).backward()
        results.append(gradients(model, inputs))
    assert MANAGER.counters.moved == 6 and MANAGER.counters.overflows == 0
    assert_identical(results[1], results[0])


def test_a_wrapped_tensor_stays(device):
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(4, 16, device=device), torch.randn(4, 16, device=device))
    assert MANAGER.offload(x) is None and MANAGER.counters.kept == 1
    assert MANAGER.offload(torch.randn(4, dtype=torch.complex64, device=device).conj()) is None
    assert MANAGER.counters.kept == 2


def test_dropout_in_attention_is_recomputed(caplog):
    """A kernel that does not run again draws nothing: every later draw would differ."""

    class Dropping(Block):
        def forward(self, hidden, timestep=None):
            q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
            hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
            return hidden + F.dropout(self.down(F.gelu(self.up(hidden))), 0.2)

    results = []
    for mode in (None, "selective"):
        torch.manual_seed(0)
        model, inputs = nn.ModuleList([Dropping() for _ in range(3)]).to(data()[0].device), data()
        if mode:
            ck.checkpoint_blocks(model, mode)
        run(model, inputs).float().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_identical(results[1], results[0])


def test_a_graph_that_is_dropped_gives_everything_back():
    model, inputs = blocks(), data()
    ck.checkpoint_blocks(model, "selective", 1.0)
    for _ in range(3):
        run(model, inputs)
        gc.collect()
        assert MANAGER.counters.in_use_bytes == 0


class Conjugated(nn.Module):
    def forward(self, h, other):
        return torch.view_as_real(h * h + 2 * other * h.sin()).sum()


def test_a_lazily_conjugated_argument_is_another_tensor(device):
    results = []
    for call in (lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False), ck.checkpoint):
        h = torch.complex(
            *torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).to(device)
        ).requires_grad_()
        moved = h * 1
        call(Conjugated(), moved, moved.conj()).backward()
        results.append([h.grad])
    assert_identical(results[1], results[0])
    assert MANAGER.counters.moved == 1


def test_a_sparse_argument_beside_the_moved_one(device):
    results = []
    for call in (lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False), ck.checkpoint):
        (x, _) = data()
        mask = torch.eye(5, device=device).to_sparse()
        call(
            lambda h, m: torch.stack([torch.sparse.mm(m, part) for part in h]).sin(), x * 1, mask
        ).sum().backward()
        results.append([x.grad])
    assert_identical(results[1], results[0])


def test_a_subclass_stays_what_it_is(device):
    class Named(torch.Tensor):
        pass

    seen = []
    x = torch.randn(2, 4, device=device, requires_grad=True)
    moved = (x * 1).as_subclass(Named)
    ck.checkpoint(lambda h: seen.append(type(h)) or h.sin(), moved).sum().backward()
    assert seen == [Named, Named] and MANAGER.counters.kept == 1


def test_hooks_without_a_name_go_first_too(caplog):
    (x, _) = data()
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(lambda t: t), lambda t: t):
        ck.checkpoint(Block().to(x.device), x * 1).sum().backward()
    assert "other saved-tensor hooks (partial)" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("selectve", 0.0), "mode must be one of full, selective; got 'selectve'"),
        (("full", -1.0), 'from 0.0 to 1.0, or "auto"; got -1.0'),
        (("full", 7), 'from 0.0 to 1.0, or "auto"; got 7'),
        (("full", "all"), "from 0.0 to 1.0, or \"auto\"; got 'all'"),
    ],
)
def test_options_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ck.checkpoint_blocks(blocks(), *arguments)
    with pytest.raises(ValueError, match="keep_last is a number of blocks, at least 0; got -1"):
        ck.checkpoint_blocks(blocks(), "full", keep_last=-1)


def test_blocks_that_move_bring_an_engine_along():
    """It closes with the last blocks that use it."""
    MANAGER.close()
    before = MANAGER.engine
    first, second, inputs = blocks(), blocks(), data()
    undo = [ck.checkpoint_blocks(model, "full", 1.0) for model in (first, second)]
    engine = MANAGER.engine
    for model in (first, second):
        run(model, inputs).sum().backward()
    assert engine is not before and not before.enable
    assert engine.counters.moved == MANAGER.counters.moved == 6
    first_undo = undo.pop(0)
    first_undo()
    first_undo()
    assert MANAGER.enable, "the others still move"
    undo.pop()()
    assert not MANAGER.enable and engine.arena is None


def test_blocks_move_with_the_engine_that_was_set_up_by_hand():
    model, inputs, engine = blocks(), data(), MANAGER.engine
    MANAGER.memory_target_bytes = 7
    undo = ck.checkpoint_blocks(model, "full", 1.0)
    with MANAGER.show(type(engine)()) as other:
        run(model, inputs).sum().backward()
        assert other.counters.moved == 0, "the blocks have theirs"
    assert MANAGER.engine is engine and engine.counters.moved == 3
    undo()
    assert MANAGER.enable, "what was set up by hand is closed by hand"
    MANAGER.close()
    ck.checkpoint_blocks(model, "full", 1.0)
    gc.collect()
    assert MANAGER.engine is not engine and MANAGER.memory_target_bytes == 7
    assert MANAGER.enable, "who never undoes it has no use for the undo"


@pytest.mark.parametrize(
    "wrap", [lambda m: ck.checkpoint_blocks(m, "full"), lambda m: ck.chunk_tokens(m[0].up, 2)]
)
def test_a_wrapped_model_is_not_copied(wrap):
    """Its copy would run the original's weights: an average of weights that never moves."""
    model = blocks()
    undo = wrap(model)
    with pytest.raises(ValueError, match=r"cannot be deep-copied; copy it before"):
        copy.deepcopy(model)
    undo()
    assert_identical(
        [p.data for p in copy.deepcopy(model).parameters()], [p.data for p in model.parameters()]
    )


class JoinedStreams(nn.Module):
    """Returns two slices of one tensor, as single-stream blocks do that joined video and text."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, video, text):
        both = torch.tanh(self.linear(torch.cat([video, text], 1)))
        return both[:, : video.size(1)], both[:, video.size(1) :]


@pytest.mark.parametrize("way", ["blocks", "calls"])
def test_slices_of_one_tensor_leave_together(way):
    """While the one stays the memory of both does, whatever was moved."""
    torch.manual_seed(0)
    model, inputs = (
        nn.ModuleList(JoinedStreams() for _ in range(4)),
        [torch.randn(2, 5, 16), torch.randn(2, 3, 16)],
    )
    results = []
    for offload in (False, True):
        undo = ck.checkpoint_blocks(model, "full", 1.0, keep_last=0) if offload and way == "blocks" else None
        states, alive = [leaf.clone().requires_grad_() for leaf in inputs], []
        leaves = list(states)
        for block in model:
            alive.append(weakref.ref(states[0].untyped_storage()))
            states = ck.checkpoint(block, *states) if offload and way == "calls" else block(*states)
        loss = states[0].square().sum() + states[1].sum()
        if offload:
            assert [reference() is None for reference in alive] == [False, True, True, True]
        loss.backward()
        results.append([*(leaf.grad for leaf in leaves), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
        if undo is not None:
            undo()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
