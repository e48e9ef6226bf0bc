"""Bits that flip on one rank of a run: of a weight, a gradient, an optimizer's state or an activation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.watching import LoopMistake, watch
from tests.video_models import CASES

# Steps between two looks, and between two replays.
EVERY = 3
PLANS = {
    "2 DDP": Plan(dp_replicate=2),
    "3 DDP": Plan(dp_replicate=3),
    "4 DDP": Plan(dp_replicate=4),
    "2 ulysses": Plan(ulysses=2),
    "2 × 2 ulysses": Plan(dp_replicate=2, ulysses=2),
    "3 FSDP2": Plan(dp_shard=3, sharding="zero3"),
    "2 × 2 FSDP2": Plan(dp_replicate=2, dp_shard=2, sharding="zero3"),
}
# Of fp32: a low and a high one of the mantissa, one of the exponent, the sign.
BITS = {"low mantissa": 3, "mantissa": 20, "exponent": 26, "sign": 31}


@dataclass(frozen=True)
class Fault:
    kind: str
    bit: str
    module: str
    rank: int
    # In which step, counted from 1.
    step: int


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def flip(tensor, bit):
    """One bit of the element that is largest, which is none that counts for nothing."""
    flat = local(tensor).view(-1)
    place = int(flat.abs().argmax())
    mask = torch.tensor(1 << bit).to(torch.int32)  # the highest one is the sign of the integer too
    flat[place : place + 1].view(torch.int32).bitwise_xor_(mask)


def flip_once(module, bit, of_gradient):
    """Of the module's output in its next forward, or of the gradient that comes back to it."""

    def hook(_module, _args, output):
        undo.remove()
        if not of_gradient:
            output = output.clone()
            flip(output, bit)
            return output

        def changed(gradient):
            gradient = gradient.clone()
            flip(gradient, bit)
            return gradient

        output.register_hook(changed)
        return output

    undo = module.register_forward_hook(hook)


def trained(plan, fault=None, *, num_steps=8, every=EVERY, replay_every=EVERY, run_ended=None, seed=0):
    """The step in which a run with this fault ends, and what is said; or how many steps there were, and "".

    Called on a rank of the plan.
    """
    parallel_states.reset()
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan)
    wrapped = model if plan.is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    case_inputs = case.inputs()
    torch.manual_seed(100 * seed + parallel_states.get_data_parallel_group().rank())
    with watch(model, plan, every=every, replay_every=replay_every, check_steps=0) as run:
        try:
            for number in range(1, num_steps + 1):
                mine = fault is not None and number == fault.step and dist.get_rank() == fault.rank
                module = model.get_submodule(fault.module) if fault else None
                if mine and fault.kind in ("activation", "gradient of an activation"):
                    flip_once(module, BITS[fault.bit], fault.kind != "activation")
                inputs = case_inputs | {"hidden_states": torch.randn_like(case_inputs["hidden_states"])}
                set_last_microbatch(model, True)
                loss = wrapped(**inputs, return_dict=False)[0].square().mean()
                run.loss(loss, samples=[f"{number}.{parallel_states.get_data_parallel_group().rank()}.mp4"])
                loss.backward()
                if mine and fault.kind == "weight in the step":
                    flip(module.weight, BITS[fault.bit])
                if mine and fault.kind == "optimizer state in the step":
                    flip(optimizer.state[module.weight]["exp_avg"], BITS[fault.bit])
                if mine and fault.kind == "gradient":
                    flip(module.weight.grad, BITS[fault.bit])
                optimizer.step()
                optimizer.zero_grad()
                if mine and fault.kind == "weight":
                    flip(module.weight, BITS[fault.bit])
                if mine and fault.kind == "optimizer state":
                    flip(optimizer.state[module.weight]["exp_avg"], BITS[fault.bit])
        except LoopMistake as mistake:
            return number, str(mistake)
    if run_ended is not None:
        run_ended(run)
    return num_steps, ""


def all_trained(plan, faults):
    return [trained(plan, fault) for fault in faults]


def ranks_named(message):
    """Those that a message calls wrong, or says to have what others have not."""
    listed = re.findall(r"[Rr]anks? (\d+(?:(?:-|, | or rank )\d+)*) (?:computes|has|have)", message)
    listed += re.findall(r" on rank (\d+) has changed", message)
    return {int(number) for each in listed for number in re.findall(r"\d+", each)}
