"""Steps of unusual make: right ones that must pass, and ones that prove nothing and must say so."""

from __future__ import annotations

import copy

import numpy
import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.communications import all_to_all, share_sizes
from opensora_accel.communications import gather_forward_split_backward as gather
from opensora_accel.communications import split_forward_gather_backward as split
from tests.verify.loops import Small, average, averaged, batch, finish, plain_ddp, split_small, spread


def never_backward(model, run):
    return model(batch()).mean()


def clears_gradients(model, run):
    loss = plain_ddp(model, run)
    model.zero_grad()
    return loss


def hands_over_nothing(model, run):
    return {"loss": plain_ddp(model, run), "gradients": {}}


def is_not_finite(model, run):
    return finish(model(batch() / 0))


def steps_within_backward(model, run):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return finish(model(batch()))


def returns_a_pair(model, run):
    return plain_ddp(model, run), 1.0


def seeds_all_alike(model, run):
    """And averages nothing, which nobody could see."""
    torch.manual_seed(0)
    return finish(model(batch()))


def trains_what_one_device_freezes(model, run):
    model.embed.requires_grad_(not run.is_reference)
    return plain_ddp(model, run)


def another_optimizer_first(model, run):
    """It is another model's, and the gradients of this one are never averaged."""
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.randn(1, 1)).sum().backward()
    optimizer.step()
    return finish(model(batch()))


class Unusual(Small):
    """Changes its input in place, fills a dict that it is given, embeds whole numbers in fp32."""

    def forward(self, x, time, seen):
        x.mul_(2)
        angles = time[:, None, None].float() * torch.arange(4, dtype=torch.float32)
        shift = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float32)
        seen["aux"] = x.square().mean()
        return super().forward(x + angles.cos() + shift)


def unusual_model(model, run):
    seen, forward = {}, averaged(model, run)
    outputs = forward(batch(), torch.tensor([1, 2]), seen)
    assert "aux" in seen
    return {"loss": finish(outputs), "lr": None}


def batches_of_unlike_size(model, run):
    forward = averaged(model, run)
    extra = {"second": 1.0} if run.data_rank else {}
    return {"loss": finish(forward(torch.randn(1 + run.data_rank, 11, 4))), **extra}


def ddp_for_each_layer(model, run):
    for name, layer in list(model.named_children()):
        setattr(model, name, averaged(layer, run))
    return finish(model(batch()))


def hand_written_optimizer(model, run):
    loss = plain_ddp(model, run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    return loss


def one_batch_split_by_the_step(model, run):
    """Count over all ranks: every rank's mean would be of another size."""
    own = torch.randn(5, 11, 4).tensor_split(run.data_size)[run.data_rank]
    forward = averaged(model, run)
    loss = forward(own).square().sum() / (5 * 11 * 4) * run.data_size
    loss.backward()
    return loss


# Right loops of other people's making.


class Spectral(nn.Module):
    """Complex weights, as of a Fourier operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        waves = torch.fft.rfft(x, dim=1)
        return self.out(torch.fft.irfft(waves * self.weight, n=x.size(1), dim=1))


def complex_weights(model, run):
    loss = finish(model(batch()))
    if not run.is_reference:
        for parameter in model.parameters():
            gradient = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
            dist.all_reduce(gradient)
            gradient /= run.world_size
    return loss


def draws_from_a_generator_of_its_own(model, run):
    generator = torch.Generator().manual_seed(run.data_rank)
    forward = spread(model, run)
    return finish(forward(torch.randn(2, 11, 4, generator=generator)))


class Patched(Small):
    """Whose class a step patches, as whole libraries do."""


def patches_the_class(model, run):
    """It wraps what is there: the next mesh would meet this one's groups, which are gone by then."""
    forward = averaged(model, run)
    if run.is_reference or run.shape.degree("sequence") == 1:
        return finish(forward(batch()))
    original, group = Patched.forward, run.mesh.get_group("sequence")

    def over_group(self, x):
        return gather(original(self, split(x, group, 1, "down")), group, 1, "up")

    Patched.forward = over_group
    return finish(forward(batch()))


class WithTable(Small):
    """A table of whole numbers that is a parameter, as quantised checkpoints have."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return super().forward(x + self.table)


class WithVariance(Small):
    """A small scale under a root."""

    def __init__(self):
        super().__init__()
        self.variance = nn.Parameter(torch.full((8,), 1e-3))

    def forward(self, x):
        return super().forward(x) * self.variance.sqrt().mean()


def numpys_noise(model, run):
    forward = spread(model, run)
    return finish(forward(torch.from_numpy(numpy.random.randn(2, 11, 4))))


def local_numbers(model, run):
    """Sums and norms of what is this rank's, over the sequence or over shards; the loss is its mean."""
    if not run.is_reference:
        model = split_small(model, run.mesh.get_group("sequence"))
        model.region = model.region[0], lambda x: x
    out = model(batch())
    total = out.square().sum()
    (total / (2 * 11 * 4)).backward()
    if not run.is_reference:
        for parameter in model.parameters():
            if parameter not in set(model.embed.parameters()):
                dist.all_reduce(parameter.grad, group=run.mesh.get_group("sequence"))
            else:
                parameter.grad *= run.mesh.get_group("sequence").size()
        average(model.parameters(), run.mesh.get_group("data"))
    return {"sum": total, "norm": out.norm(), "largest": out.abs().max(), "tokens": out[..., 0].numel()}


def two_iterations(model, run):
    forward, losses = averaged(model, run), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(finish(forward(batch())))
        optimizer.step()
    return {"first": losses[0], "last": losses[-1]}


class Insisting(Small):
    def forward(self, x):
        assert x.dtype == torch.float32
        return super().forward(x)


class OnGpuOnly(Small):
    def forward(self, x):
        if not x.is_cuda:
            raise RuntimeError("expected a CUDA tensor")
        return super().forward(x)


class WithFlashAttention(nn.Module):
    """Whose attention is flash_attn's, over heads that are exchanged for tokens."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(4, 12, bias=False) for _ in range(3))
        self.out, self.group = nn.Linear(12, 4), None

    def forward(self, x):
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q, k, v = (layer(x).unflatten(-1, (3, 4)) for layer in (self.to_q, self.to_k, self.to_v))
        if self.group is None:
            lengths = torch.tensor([0, 11, 22], dtype=torch.int32)
            packed = (each.flatten(0, 1) for each in (q, k, v))
            out = flash_attn_varlen_func(*packed, lengths, lengths, 11, 11, causal=True).view_as(q)
        else:
            shares = share_sizes(11, self.group.size())
            q, k, v = (all_to_all(each, self.group, 2, 1, splits=shares) for each in (q, k, v))
            out = all_to_all(flash_attn_func(q, k, v, causal=True), self.group, 1, 2)
        return self.out(out.flatten(-2))


def flash_attention_over_heads(model, run):
    if run.is_reference:
        return finish(model(batch()))
    model.group = run.mesh.get_group("sequence")
    shares = share_sizes(11, model.group.size())
    local = batch().split(shares, 1)[model.group.rank()]
    forward = averaged(model, run)
    loss = forward(local).square().sum() / (2 * 11 * 4) * model.group.size()
    loss.backward()
    return loss


def gives_all_the_same_samples(model, run):
    """And averages, which nobody can see."""
    torch.manual_seed(0)
    return plain_ddp(model, run)


def draws_for_nothing(model, run):
    """As a DataLoader does for its workers."""
    torch.randint(9, ())
    return draws_from_a_generator_of_its_own(model, run)


def keeps_an_average(model, run):
    """A copy made in the step, as of an EMA or a frozen teacher, which runs too."""
    loss_before = None if run.is_reference else model.out.weight.detach().clone()
    average = copy.deepcopy(model).requires_grad_(False)
    forward, given = averaged(model, run), batch()
    target = average(given)
    loss = (forward(given) - 0.5 * target).square().mean()
    loss.backward()
    with torch.no_grad():
        for mine, new in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(new, 0.1)
    assert loss_before is None or torch.equal(loss_before, model.out.weight)
    return loss


def forward_by_the_transforms(model, run):
    """Gradients of parameters by torch.func.grad, and a derivative along a direction by torch.func.jvp."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    given = batch()

    def loss_of(parameters):
        out, tangent = torch.func.jvp(
            lambda x: torch.func.functional_call(model, parameters, (x,)), (given,), (torch.ones_like(given),)
        )
        return out.square().mean() + tangent.square().mean()

    gradients = torch.func.grad(loss_of)(parameters)
    loss = loss_of(parameters)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
        if not run.is_reference:
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
    return loss


def penalises_its_gradient(model, run):
    """torch.func.grad with respect to the input, for a score, beside an ordinary loss."""
    forward, given = averaged(model, run), batch()
    score = torch.func.grad(lambda x: model(x).square().mean())(given)
    loss = (forward(given) - score.detach()).square().mean()
    loss.backward()
    return loss


def steps_by_a_closure(model, run):
    """The optimizer runs forward and backward itself, and more than once."""
    forward, given = averaged(model, run), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(finish(forward(given)))
        return losses[-1]

    optimizer.step(closure)
    return losses[0]


def steps_by_a_closure_without_an_average(model, run):
    """As `steps_by_a_closure`, and each rank steps by its own gradients."""
    given = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step(closure=lambda: finish(model(given)))


def narrows_what_it_sends(model, run):
    loss = model(batch().bfloat16()).float().square().mean()
    loss.backward()
    for parameter in () if run.is_reference else model.parameters():
        sent = parameter.grad.half()
        dist.all_reduce(sent)
        parameter.grad.copy_(sent / run.world_size)
    return loss
