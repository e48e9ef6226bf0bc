"""Attention, norms and parameters: operators that compute something else, many of them on one device too."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensora_accel.attention import local_attention
from opensora_accel.communications import all_to_all, copy_forward_reduce_backward
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import SEQUENCE, Adapted, add_up, attend_over_ranks, six_heads, three_key_heads
from tests.verify.loops import Small, average, averaged, batch, finish, plain_ddp
from tests.verify.steps import CHANNELS, OneLayer


class _TransposedTwice(torch.autograd.Function):
    """Attention over [B, S, H, D] by a kernel that takes [B, H, S, D], with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_wrong: bool) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.is_wrong = is_wrong
        return (weights @ v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grad.transpose(1, 2)
        if ctx.is_wrong:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        of_v = weights.mT @ grad
        of_weights = grad @ v.mT
        of_scores = (
            weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
        )
        return *(each.transpose(1, 2) for each in (of_scores @ k, of_scores.mT @ q, of_v)), None


def keys_transposed_twice(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Forward saves keys and values transposed, and backward transposes them again; with as many tokens as heads
    every shape fits, and the gradients are those of other keys."""
    model.attend = lambda q, k, v: _TransposedTwice.apply(q, k, v, is_wrong)
    forward = averaged(model, run)
    return finish(forward(torch.randn(2, 6, CHANNELS)))


def mask_in_another_order(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Each rank joins its share of the text to its share of the picture before the all-to-all, so that the sequence
    that attention sees alternates between them; the mask of padded text has all the text first."""
    num_text, num_image, ranks = 6, 12, run.shape.degree("sequence")
    mask = torch.ones(2, num_text + num_image, dtype=torch.bool)
    mask[0, 2:num_text] = mask[1, 4:num_text] = False
    model.attend = lambda q, k, v: local_attention(q, k, v, mask=mask)
    text, image = torch.arange(num_text), torch.arange(num_text, num_text + num_image)
    pairs = zip(text.chunk(ranks), image.chunk(ranks), strict=True)
    order = torch.cat([each for pair in pairs for each in pair])  # of the tokens, rank after rank

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = run.mesh.get_group("sequence")
        q, k, v = (all_to_all(each, group, 2, 1) for each in (q, k, v))
        out = local_attention(q, k, v, mask=mask if is_wrong else mask[:, order])
        return all_to_all(out, group, 1, 2)

    return attend_over_ranks(model, run, attend, num_text + num_image, order)


def heads_padded_apart(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Heads that do not divide are padded, those of the queries and those of the keys each to the next multiple:
    where that gives another ratio between them, queries meet the keys of another group."""
    heads, kv_heads, ranks = 12, 3, run.shape.degree("sequence")
    kv_padded = -(-kv_heads // ranks) * ranks
    padded = -(-heads // ranks) * ranks if is_wrong else kv_padded * (heads // kv_heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = run.mesh.get_group("sequence")
        q = F.pad(q, (0, 0, 0, padded - heads))
        k, v = (F.pad(each, (0, 0, 0, kv_padded - kv_heads)) for each in (k, v))
        out = local_attention(*(all_to_all(each, group, 2, 1) for each in (q, k, v)))
        return all_to_all(out, group, 1, 2)[:, :, :heads]

    return attend_over_ranks(model, run, attend)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_wrong: bool) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x * scale, scale, weight)
        ctx.is_wrong = is_wrong
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        normed, scale, weight = ctx.saved_tensors
        of_weight = None if ctx.is_wrong else (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        return scale * (grad - normed * (grad * normed).mean(-1, keepdim=True)), of_weight, None


def norm_without_a_gradient(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The backward of a fused RMSNorm returns no gradient for its weight, which stays as it was although it should be
    trained."""
    # LayerNorm's place in the model is taken, its bias is left out.
    model.norm.bias.requires_grad_(False)
    model.norm.forward = lambda x: _RMSNorm.apply(x, model.norm.weight, is_wrong)
    forward = averaged(model, run, find_unused_parameters=True)
    return finish(forward(batch()))


class _LogSoftmax(torch.autograd.Function):
    """Over classes [B, S, V/P] that are spread over a group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any, is_wrong: bool) -> Tensor:
        most = logits.amax(-1, keepdim=True)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        total = (logits - most).exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        out = logits - most - total.log()
        ctx.save_for_backward(out)
        ctx.group, ctx.is_wrong = group, is_wrong
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.is_wrong:  # the backward of the cross-entropy, which is not there, would have done it
            return grad, None, None
        (out,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return grad - out.exp() * total, None, None


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())


def log_softmax_for_cross_entropy_only(model: Classes, run: Run, is_wrong: bool) -> Tensor:
    """Where classes are spread over ranks, the backward of log_softmax is replaced by the identity, as the
    cross-entropy behind it does that work too; a loss that takes log-probabilities without it gets the identity as
    well."""
    x, advantage = batch(), torch.randn(2, 11, 12)
    if run.is_reference:
        loss = -(model(x).log_softmax(-1) * advantage).mean()
        loss.backward()
        return loss
    group = run.mesh.get_group("tensor")
    own = torch.arange(12).chunk(group.size())[group.rank()]
    hidden = copy_forward_reduce_backward(model.embed(x).tanh(), group)
    logits = F.linear(hidden, model.head.weight[own], model.head.bias[own])
    loss = -(_LogSoftmax.apply(logits, group, is_wrong) * advantage[..., own]).sum() / advantage.numel()
    loss.backward()
    add_up(model.head.parameters(), run, "tensor")
    average(model.parameters(), run.mesh.get_group("data"))
    return loss


def other_dropout_when_run_again(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Checkpointing is told not to keep the state of the generators, and what runs again in backward drops other
    numbers than forward did."""
    model.mlp.forward = lambda x: checkpoint(
        lambda x: F.dropout(F.linear(x, model.mlp.weight, model.mlp.bias), 0.5),
        x,
        use_reentrant=False,
        preserve_rng_state=not is_wrong,
    )
    return plain_ddp(model, run)


def transposed_once_more(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Attention of packed samples gives heads and head dim the other way round than other kernels do, the model
    transposes its output like theirs, and the view that follows takes any order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = local_attention(q, k, v)
        return out.transpose(2, 3).reshape(out.shape) if is_wrong else out

    if not hasattr(model, "is_plain"):
        model.attend = attend
    forward = averaged(model, run)
    return finish(forward(torch.randn(2, 11, CHANNELS)))


def plain_attention() -> OneLayer:
    """Whose attention stays as it is."""
    model = six_heads()
    model.is_plain = True
    return model


def thawed_when_distributed(model: Adapted, run: Run, is_wrong: bool) -> Tensor:
    """Parameters are wrapped anew when they are distributed, and a new parameter takes gradients unless it is told
    otherwise: the frozen base of an adapter is trained."""
    if not run.is_reference:
        for layer in (model.base, model.down, model.up):
            for name, parameter in list(layer.named_parameters()):
                flag = True if is_wrong else parameter.requires_grad
                layer.register_parameter(name, nn.Parameter(parameter.detach().clone(), requires_grad=flag))
    forward = averaged(model, run)
    return finish(forward(batch()))


class Tied(Small):
    """Whose last layer is its first one, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)
        self.table = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        return self.head(hidden + torch.tanh(self.mlp(self.norm(hidden))))


def untied_when_materialised(model: Tied, run: Run, is_wrong: bool) -> Tensor:
    """Memory is given to every parameter by itself, and a head that shared the embedding's weight has one of its own
    from then on: the embedding gets the gradient of its input side alone."""
    if not run.is_reference and is_wrong:
        model.head.weight = nn.Parameter(model.table.weight.detach().clone())
    for unused in (model.embed, model.out):
        unused.requires_grad_(False)
    forward = averaged(model, run)
    return finish(forward(torch.randint(7, (2, 11))))


ODD_HEADS = ({"data": 1, "sequence": 4}, {"data": 2, "sequence": 2}, {"data": 1, "sequence": 3})
ON_ONE_DEVICE = "one device computes the same"

BUGS = [
    Bug(
        "huggingface/diffusers", 14338, 2026, keys_transposed_twice,
        "only with as many tokens as heads no shape is wrong", "derivative", model_fn=six_heads, tool="single device",
    ),
    Bug(
        "huggingface/diffusers", 13756, 2026, mask_in_another_order, "without padding the mask hides nothing",
        "values", ("sequence",), model_fn=six_heads, meshes=SEQUENCE,
    ),
    Bug(
        "vllm-project/vllm-omni", 5716, 2026, heads_padded_apart, "most head counts fail, or keep their ratio",
        "values", ("sequence",), model_fn=three_key_heads, meshes=ODD_HEADS,
    ),
    Bug(
        "unslothai/unsloth", 4533, 2026, norm_without_a_gradient, ON_ONE_DEVICE, "derivative",
        tool="single device",
    ),
    Bug(
        "pytorch/pytorch", 190746, 2026, log_softmax_for_cross_entropy_only, "with a cross-entropy it is right",
        "values", ("tensor",), model_fn=Classes, meshes=({"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}),
    ),
    Bug(
        "allenai/OLMo-core", 828, 2026, other_dropout_when_run_again, ON_ONE_DEVICE, "derivative", tool="single device",
    ),
    Bug(
        "pytorch/torchtitan", 2223, 2026, transposed_once_more, ON_ONE_DEVICE + ", and its gradient fits", "plain",
        model_fn=six_heads, plain_model_fn=plain_attention, tool="single device",
    ),
    Bug(
        "pytorch/torchtitan", 4267, 2026, thawed_when_distributed, "the loss goes down sooner", "missing gradient",
        ("data",), model_fn=Adapted,
    ),
    Bug(
        "verl-project/verl", 7835, 2026, untied_when_materialised, "both weights are right when training starts",
        "untied", ("data",), model_fn=Tied,
    ),
]  # fmt: skip
