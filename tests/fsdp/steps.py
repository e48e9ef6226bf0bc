"""Training steps on one device and on sharded parameters, of the same samples."""

import torch

from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.precision import lift_casts
from shardformer import clip_grad_norm_
from shardformer.tensor_parallel import full_tensor
from tests.models import wan, wan_inputs

STEPS = 10


def make_model(dtype=torch.float64):
    model = wan(dtype)
    if dtype == torch.float64:
        lift_casts(model)
    return model


def batch(step, micro, rows=slice(None), dtype=torch.float64):
    """Four samples: latents, timesteps, text and target."""
    inputs = wan_inputs(dtype, batch=4, frames=3, height=4, width=6)  # 18 tokens: no multiple of 4
    generator = torch.Generator().manual_seed(10 * step + micro)
    shape = inputs["hidden_states"].shape
    inputs["hidden_states"] = torch.randn(shape, generator=generator, dtype=dtype)
    target = torch.randn(shape, generator=generator, dtype=dtype)
    return {name: value[rows] for name, value in inputs.items()}, target[rows]


def clipped(model, max_norm):
    """Clips, and returns the norm before."""
    return clip_grad_norm_(model, max_norm).item()


def train(model, rows, accumulation, clip, steps=STEPS, dtype=torch.float64, device="cpu"):
    """The gradient norms of every step, and the last step's gradients, clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            inputs, target = batch(step, micro, rows, dtype)
            inputs, target = {name: value.to(device) for name, value in inputs.items()}, target.to(device)
            set_last_microbatch(model, micro == accumulation - 1)
            (out,) = model(**inputs, return_dict=False)
            ((out.to(dtype) - target).square().mean() / accumulation).backward()
        norms.append(clipped(model, clip))
        optimizer.step()
    return norms, {name: p.grad for name, p in model.named_parameters()}


def whole(model, tensors):
    return {name: full_tensor(model, name, tensor) for name, tensor in tensors.items()}
