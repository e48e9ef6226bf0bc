"""Training steps of real models under a timeline, beside live bytes that are counted on their own."""

import gc

import torch

import shardformer
from opensora_accel import init_parallel
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.observe.owners import plain_tensors
from opensora_accel.profiler import LiveBytes, MemoryTimeline
from tests.video_models import CASES

ARENA_BYTES = 4_000_000


def one_second_step():
    """A model, and inputs of 2,400 tokens: a step of about a second on one core."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, ffn_dim=1024, num_layers=4, text_dim=64, freq_dim=64
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 6, 40, 40),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 16, 64),
    }
    return model, inputs


def shortened(inputs):
    """Those of a step of 4 tokens: it calls as many operators, and is over in a hundredth of the time."""
    return inputs | {"hidden_states": inputs["hidden_states"][:, :, :1, :4, :4]}


def share_of_step(of_short, of_long):
    """What is added to a step, found from short ones and held against a long one, each `(with it, without)` [s].

    Hooks and records cost the same for any number of tokens. In a short step their milliseconds are seen; in a long one
    they drown in what else the machine does, which the least of several times contains least of.
    """
    added = min(with_it for with_it, _ in of_short) - min(without for _, without in of_short)
    ratios = sorted(with_it / without for with_it, without in of_long)
    long = min(without for _, without in of_long)
    print(f"{1e3 * added:.2f} ms in a step of {long:.2f} s: {added / long:.4%}")
    print(
        f"long steps with it take {ratios[len(ratios) // 2]:.4f} [{ratios[0]:.4f} to {ratios[-1]:.4f}] of those without"
    )
    return added / long


def tensors_of(model, optimizer):
    held = [*model.parameters(), *model.buffers()]
    held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held += [value for state in optimizer.state.values() for value in state.values()]
    return [plain for tensor in held if isinstance(tensor, torch.Tensor) for plain in plain_tensors(tensor)]


def run(model, inputs, optimizer, steps=2):
    for _ in range(steps):
        (out,) = model(**inputs, return_dict=False)
        out.square().mean().backward()
        del out
        optimizer.step()
        optimizer.zero_grad()


def compare(plan, name):
    """What a timeline tells of two steps, and what live bytes are without it, around it and at its samples."""
    init_parallel(plan)
    GLOBAL_ACTIVATION_MANAGER.close()
    if plan.offload:
        GLOBAL_ACTIVATION_MANAGER.setup_arena(ARENA_BYTES)
    model = shardformer.shard(CASES[name].make(), plan)
    inputs = CASES[name].inputs()
    optimizer = torch.optim.AdamW(model.parameters())
    live = LiveBytes()
    live.count(tensors_of(model, optimizer))
    for memory in GLOBAL_ACTIVATION_MANAGER.arena.memory if plan.offload else ():
        live.ignore(memory)
    with live:
        timeline = MemoryTimeline(model, optimizer)
        with timeline:
            run(model, inputs, optimizer)
    found = {
        "live": live.peak_bytes,
        "peak": timeline.peak,
        "samples": timeline.samples,
        # After every operator, and at the end.
        "equal": live.timeline == timeline.counter.timeline and live.now_bytes == timeline.counter.now_bytes,
        "text": str(timeline),
    }
    GLOBAL_ACTIVATION_MANAGER.close()
    gc.collect()
    return found
