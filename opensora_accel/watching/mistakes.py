"""The mistakes of a loop: what each is called, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

REMEDIES = {
    "weights": "load or initialise the same weights on all of them",
    "drifted weights": "go on from a state that was saved while they were equal, and look for what one rank alone has "
    "done since: a step that it skipped or took by itself, or a device that computes wrong",
    "drifted gradients": "look for what one rank alone has done since they were equal: another sample, noise or path "
    "of the code, an average that it left out, or a device that computes wrong",
    "drifted optimizer states": "go on from a state that was saved while they were equal, and look for a device that "
    "computes wrong: states are made of gradients and weights that are equal",
    "optimizer states": "load the same states on all of them, or none",
    "device": "take the machine of this rank out of the job (drain the node) and test its card; go on, on other ranks, "
    "from a state that was saved no later than the last look in which all was equal",
    "shard at rest": "take the machine of this rank out of the job (drain the node) and test its memory, unless the "
    "loop itself writes weights between a forward and the optimizer; go on from a state that was saved before",
    "loaded state": "look for what the loader left as it was, filled with zeros or read at another place, and whether "
    "what was saved is all that there is; go on only with what was saved",
    "bucket": "draw buckets by parallel_states.get_data_parallel_group().rank(), and not by the global rank",
    "sample": "deal samples to data ranks: a sampler over parallel_states.get_data_parallel_group(), or "
    "integrations.accelerate.data_parallel_dataloader",
    "repeated samples": "deal samples to data ranks: a sampler over parallel_states.get_data_parallel_group()",
    "noise": "draw noise per sample, or from a generator that is seeded by the data rank",
    "repeated noise": "draw noise per sample, or from a generator that is seeded by the data rank",
    "timestep": "draw timesteps per sample, or from a generator that is seeded by the data rank",
    "repeated timestep": "draw timesteps per sample, or from a generator that is seeded by the data rank",
    "caption dropout": "draw dropped captions per sample, or from a generator that is seeded by the data rank",
    "eval mode": "call model.train() when sampling or validation is over",
    "stale gradients": "call optimizer.zero_grad() after each optimizer.step()",
    "cleared gradients": "call optimizer.zero_grad() after optimizer.step() or before the backward, and not in between",
    "skipped step": "agree on what decides (a finite loss or norm, an overflow, the end of the data) by an all-reduce, "
    "and step on all ranks or on none",
    "loss": "compute it on the whole output, which each of them has, and reduce it over no ranks before the backward",
    "loss scale": "backward the mean over this rank's samples, divided by the number of backwards in a step; multiply "
    "or divide by no number of ranks",
    "gradients": "average them over all ranks: DDP or FSDP2 without a process group, or with "
    "parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)",
    "reduction": "average gradients once over all ranks, as DDP and FSDP2 do; sum over none, divide by nothing more",
    "clipping": "clip by the norm of all shards, when gradients are averaged: "
    "shardformer.clip_grad_norm_(model, max_norm), or torch.nn.utils.clip_grad_norm_ on DTensors",
    "optimizer": "make the optimizer after shardformer.shard(model, plan), from model.parameters()",
    "unmoved weight": "give it a learning rate and write no old value back, or freeze it: requires_grad_(False)",
    "ema": "update it on every rank that was given one, after the optimizer's step",
    "sampling": "sample on all ranks under torch.no_grad(), and keep neither outputs nor models on the device",
    "saved weights": "save full tensors by the names of the model itself: shardformer.tensor_parallel.full_state_dict, "
    "or shardformer.save_lora for adapters",
}


class LoopMistake(ValueError):
    """What a loop does wrong; `names` are keys of `REMEDIES`."""

    def __init__(self, found: Sequence[tuple[str, str]], step: int):
        self.names = tuple(name for name, _ in found)
        listed = "".join(f"\n  {name}: {what}. To do: {REMEDIES[name]}" for name, what in found)
        super().__init__(f"in step {step} this loop does not train as one device would:{listed}")
