"""Selective checkpointing: self-attention runs once, its output is kept or moves, the rest is recomputed."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from opensora_accel import checkpoint as ck
from opensora_accel.checkpoint import selective
from shardformer.modeling import attention
from tests.checkpoint import steps
from tests.checkpoint.steps import Block, assert_identical, blocks, data, gradients, run

MANAGER = ck.GLOBAL_ACTIVATION_MANAGER


class CountKernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.attention, self.linear, self.results = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            self.attention += 1
            self.results.append(weakref.ref(out[0].untyped_storage()))
        self.linear += func is torch.ops.aten.addmm.default
        return out


@pytest.mark.parametrize(("mode", "calls"), [("full", 4), ("selective", 2)])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_attention_runs_once(mode, calls, offload):
    model, inputs = blocks(2), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, mode, offload)
    with CountKernels() as count:
        run(model, inputs).sum().backward()
    assert count.attention == calls
    assert count.linear >= 2 * 7, "projections and MLP are recomputed"


def test_moved_outputs_leave_the_device():
    model, inputs = blocks(4), data()
    MANAGER.setup_arena(1 << 20)
    ck.checkpoint_blocks(model, "selective", 1.0)
    with CountKernels() as count:
        out = run(model, inputs)
        gc.collect()
        assert [reference() is not None for reference in count.results] == [False, False, False, True]
        # Of 5 tokens; the kernel that a GPU has for fp32 pads them to 32.
        log_sum_exp_bytes = 2 * 2 * (5 if steps.DEVICE == "cpu" else 32) * 4
        input_bytes = 2 * 5 * 16 * 4
        assert MANAGER.counters.in_use_bytes == 3 * (2 * input_bytes + -(-log_sum_exp_bytes // 16) * 16)
        out.sum().backward()


def test_no_other_operator_passes_through_python():
    """A mode on torch's stack sees every operator, and each one then costs as much as a small kernel."""
    model, inputs = blocks(2), data()
    ck.checkpoint_blocks(model, "selective")
    depths = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: depths.append(len(_get_current_dispatch_mode_stack())))
    run(model, inputs).sum().backward()
    assert len(depths) >= 2 * (4 + 3) and set(depths) == {0}


def torch_selective(function, *args):
    aten = torch.ops.aten
    policy = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
    ]
    return torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )


class Inner(nn.Module):
    """A block in a checkpoint of its own, within the block."""

    def __init__(self, inner):
        super().__init__()
        self.block, self.inner = Block(), inner

    def forward(self, hidden, timestep):
        return self.inner(self.block, hidden.sin(), timestep).cos()


def ours_selective(block, *args):
    wrapped = getattr(block, "wrapped", None)
    if wrapped is None:
        block.wrapped = ck.checkpoint_blocks([block], "selective")
    return block(*args)


@pytest.mark.parametrize("inner", [torch_selective, ours_selective])
def test_a_selective_checkpoint_within_a_selective_block(inner):
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        plain = None if checkpointed else (lambda block, *args: block(*args))
        model, inputs = nn.ModuleList([Inner(plain or inner) for _ in range(2)]).to(data()[0].device), data()
        if checkpointed:
            ck.checkpoint_blocks(model, "selective")
        with CountKernels() as count:
            run(model, inputs).square().sum().backward()
        assert count.attention == 2
        results.append(gradients(model, inputs))
    assert_identical(results[1], results[0])


def test_a_gradient_within_the_block():
    """Its backward runs while the block's forward does, and recomputes a part of it."""

    class Guided(Block):
        def forward(self, hidden, timestep=None):
            x = hidden.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(x, timestep).square().sum(), x)
            return super().forward(hidden, timestep) + gradient

    results = []
    for mode in (None, "selective"):
        torch.manual_seed(0)
        model, inputs = nn.ModuleList([Guided() for _ in range(2)]).to(data()[0].device).eval(), data()
        if mode:
            ck.checkpoint_blocks(model, mode)
        run(model, inputs).square().sum().backward()
        results.append(gradients(model, inputs))
    assert_identical(results[1], results[0])


class PartCompiled(nn.Module):
    """Its attention is compiled, the rest is not."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend = torch.compile(self.attention, backend="aot_eager")

    def attention(self, hidden):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, hidden, timestep):
        return hidden + self.out(self.attend(hidden * timestep)).sin()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "other_is_sharded"), [("full", False), ("selective", False), ("selective", True)]
)
def test_a_compiled_part_of_a_block(mode, other_is_sharded):
    if other_is_sharded:
        attention._install()  # from then on torch's attention is looked at, wherever it is called
    results = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = nn.ModuleList([PartCompiled() for _ in range(2)]).to(data()[0].device), data()
        if checkpointed:
            ck.checkpoint_blocks(model, mode)
        for _ in range(2):  # the first step compiles
            loss = run(model, inputs).square().sum()
            loss.backward()
        results.append(gradients(model, inputs))
    torch._dynamo.reset()
    assert_identical(results[1], results[0])


class Crossed(Block):
    """Self-attention, then attention to two text tokens, as in Wan."""

    def forward(self, hidden, text):
        hidden = super().forward(hidden)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (hidden, text, text))
        return hidden + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_cross_attention_to_a_short_text_is_recomputed():
    results = []
    for mode in (None, "selective"):
        torch.manual_seed(0)
        x, t = data()
        model, text = nn.ModuleList([Crossed() for _ in range(2)]).to(x.device), t.expand(-1, 2, -1)
        undo = ck.checkpoint_blocks(model, mode) if mode else None
        with CountKernels() as count:
            run(model, (x, text)).sum().backward()
        assert count.attention == (6 if mode else 4), (
            "four in forward; of both kinds in recomputation the cross one"
        )
        results.append([*[p.grad for p in model.parameters()], x.grad, t.grad])
        if undo:
            undo()
    assert_identical(results[1], results[0])


def test_a_kernel_with_dropout_is_not_kept():
    """It draws no numbers when it does not run again, and every later draw would differ. CPU has no such kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1, 2, 4, 8, device="meta")
    assert selective._is_kept(kernel, (q, q, q), {})
    assert selective._is_kept(kernel, (q, q, q, 0.0), {})
    assert not selective._is_kept(kernel, (q, q, q, 0.1), {})
    assert not selective._is_kept(kernel, (q, q, q), {"dropout_p": 0.1})
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert selective._is_kept(efficient, (q, q, q, None, True), {})
    assert not selective._is_kept(efficient, (q, q, q, None, True, 0.1), {})
    assert not selective._is_kept(torch.ops.aten.mm.default, (q, q), {})


def test_a_block_that_attends_to_something_else_in_recomputation_is_found():
    class Fickle(Block):
        calls = 0

        def forward(self, hidden, timestep=None):
            self.calls += 1
            for _ in range(self.calls):
                q = self.out(hidden).unsqueeze(1)
                hidden = F.scaled_dot_product_attention(q, q, q)[:, 0]
            return hidden.sin().cos().sin().cos().sin().cos().sin()

    model = nn.ModuleList([Fickle()]).to(data()[0].device)
    ck.checkpoint_blocks(model, "selective")
    with pytest.raises(RuntimeError, match="as attention number 2, the forward did not"):
        model[0](data()[0]).sum().backward()


def test_a_block_without_a_kernel_says_so(caplog):
    selective._warn_nothing_kept.cache_clear()
    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]).to(data()[0].device)
    ck.checkpoint_blocks(model, "selective")
    hidden = data()[0]
    for block in model:
        hidden = block(hidden)
    hidden.sum().backward()
    (record,) = caplog.records
    assert "kept nothing: no fused self-attention kernel" in record.message


def test_a_kept_output_that_changes_is_found():
    class Greedy(Block):
        def forward(self, hidden, timestep=None):
            q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)
            with torch.no_grad():
                attended.mul_(2)
            return self.out(attended.transpose(1, 2).flatten(2))

    model = nn.ModuleList([Greedy()]).to(data()[0].device)
    ck.checkpoint_blocks(model, "selective")
    with pytest.raises(RuntimeError, match="changed in place"):
        model[0](data()[0]).sum().backward()


def test_selective_under_autocast():
    results = []
    for offload in (None, 0.0, 1.0):
        model, inputs = blocks(3), data()
        MANAGER.setup_arena(1 << 20)
        if offload is not None:
            ck.checkpoint_blocks(model, "selective", offload)
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            loss = run(model, inputs).float().square().sum()
        loss.backward()
        results.append(gradients(model, inputs))
    assert_identical(results[1], results[0])
    assert_identical(results[2], results[0])


# As hopper/flash_api.cpp of flash-attn 3 declares it; only what a call here gives stands for the many options.
FA3 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, float? softmax_scale = None, "
    "bool is_causal = False) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


@pytest.fixture
def flash_attn_3():
    """Operators of flash-attn 3's names, computed by torch's kernel for CPUs; counts the calls that compute."""
    calls = []
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def fwd(q, k, v, *options, **named):
        calls.append(q.shape)
        out, lse = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2).contiguous(), lse, q.new_empty(0), q.new_empty(0)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, name, q, k, v):
            out, lse, *_ = getattr(torch.ops.flash_attn_3, name)(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            *tensors, lse = (*ctx.saved_tensors,)
            grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, *tensors))
            grads = backward(grad, q, k, v, out, lse, 0.0, False)
            return None, *(tensor.transpose(1, 2) for tensor in grads)

    # Defined after a first selective checkpoint has run, as by an import that comes late.
    ck.checkpoint_blocks(early := blocks(1), "selective")
    run(early, data()).sum().backward()
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FA3)
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor, Tensor)")
    library.impl("fwd", fwd, "CPU")
    library.impl("_flash_attn_forward", lambda q, k, v: torch.ops.flash_attn_3.fwd(q, k, v), "CPU")
    yield Function.apply, calls
    library._destroy()


@pytest.mark.parametrize("name", ["fwd", "_flash_attn_forward"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_flash_attention_3_runs_once(name, offload, device, flash_attn_3):
    if device != "cpu":
        pytest.skip("the operators are stand-ins on the CPU")
    attend, calls = flash_attn_3

    class Hopper(Block):
        def forward(self, hidden, timestep=None):
            q, k, v = self.qkv(hidden * timestep).unflatten(-1, (3, 2, -1)).unbind(2)
            return hidden + self.out(attend(name, q, k, v).flatten(2))

    results = []
    for mode in (None, "selective"):
        torch.manual_seed(0)
        model, inputs = nn.ModuleList([Hopper() for _ in range(3)]), data()
        if mode:
            MANAGER.setup_arena(1 << 20)
            ck.checkpoint_blocks(model, mode, offload)
        calls.clear()
        run(model, inputs).square().sum().backward()
        assert len(calls) == 3
        results.append([p.grad for p in model.parameters() if p.grad is not None] + [inputs[0].grad])
    assert_identical(results[1], results[0])


def ring_cross_attention():
    """3 and 2 queries, 2 and 2 keys: by its own sizes one rank would keep the ring's output, and the other not."""
    import torch.distributed as dist

    from opensora_accel.attention import ring_attention
    from opensora_accel.checkpoint import checkpoint_blocks

    class Block(torch.nn.Module):
        def forward(self, hidden_states, keys):
            options = {"splits": (3, 2), "kv_splits": (2, 2)}
            return ring_attention(hidden_states, keys, keys, dist.group.WORLD, **options)

    found = []
    for mode in (None, "selective"):
        torch.manual_seed(dist.get_rank())
        block = Block()
        if mode:
            checkpoint_blocks([block], mode)
        q = torch.randn(1, 3 - dist.get_rank(), 2, 8, requires_grad=True)
        keys = torch.randn(1, 2, 2, 8, requires_grad=True)
        block(q, keys).square().sum().backward()
        found.append([q.grad, keys.grad])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def ring_by_slices():
    """Gradients of a block that is recomputed but for attention, and how many messages its backward sends."""
    import torch.distributed as dist

    from opensora_accel.attention import ring_attention
    from opensora_accel.attention.slices import AttentionSlices, deal
    from opensora_accel.checkpoint import checkpoint_blocks
    from tests.attention.counting import counted

    shares = deal(AttentionSlices.block_causal(4, 3), 2)

    class Block(torch.nn.Module):
        def forward(self, x):
            return ring_attention(
                x, 2 * x, x + 1, dist.group.WORLD, slices=shares, splits=(6, 6), kv_splits=(6, 6)
            )

    found = []
    for mode in (None, "selective", "full"):
        torch.manual_seed(dist.get_rank())
        block = Block()
        if mode:
            checkpoint_blocks([block], mode)
        x = torch.randn(1, 6, 2, 8, requires_grad=True)
        out = block(x).square().sum()
        with counted() as sent:
            out.backward()
        found.append((x.grad, sent.num_collectives))
    return found


def test_attention_by_slices_is_kept_and_not_sent_again(ranks):
    if steps.DEVICE != "cpu":
        pytest.skip("the ranks are on the CPU")
    for (plain, once), (of_selective, kept), (of_full, twice) in ranks(2, ring_by_slices):
        assert torch.equal(plain, of_selective)
        assert torch.equal(plain, of_full)
        assert kept == once < twice


def test_all_ranks_of_a_ring_keep_its_output_or_none(ranks):
    if steps.DEVICE != "cpu":
        pytest.skip("the ranks are on the CPU")
    assert all(ranks(2, ring_cross_attention))
