"""Seeded generators of what users give: configurations, good and bad, and damaged video files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAN, INF, HUGE = float("nan"), float("inf"), 10**12


@dataclass(frozen=True)
class Case:
    """A run's options that differ from a tiny good one, by full name; whether they are good."""

    changes: dict[str, Any]
    is_good: bool

    def __str__(self) -> str:
        return json.dumps(self.changes, default=str)[:120]


GOOD: dict[str, list[Any]] = {
    "seed": [0, 1, 2**62],
    "log_every": [1, 1000, HUGE],
    "save_every": [1, 3, HUGE],
    "keep_checkpoints": [1, HUGE],
    "num_samples": [0, 1, HUGE],
    "watch": [0, 1, HUGE],
    "timeout_s": [0, 30.5, 1e6],
    "data.num_frames": [1, 3, 9],
    "data.frame_stride": [1, 2],
    "data.height": [8, 16, 48],
    "data.width": [8, 64],
    "data.batch_size": [1, 3],
    "codec.patch": [2, 4],
    "text.length": [8, 40],
    "text.width": [8, 48, 100],
    "text.cache": [True, False],
    "lora.kind": ["lora"],
    "lora.rank": [1],
    "lora.factor": [0],
    "lora.base": ["whole"],
    "flow.shift": ["auto", 0.1, 3, 1e6],
    "flow.time_distribution": ["uniform", "logit-normal"],
    "flow.diffusion_forcing": ["none"],
    "flow.ar_step": [0],
    "flow.causal_block_size": [0],
    "flow.addnoise_condition": [0],
    "flow.sample_frames": [0],
    "flow.overlap_history": [0],
    "flow.weighting": ["none", "bell"],
    "flow.huber": [0, 0.1],
    "flow.noise_offset": [0, 0.1],
    "flow.time_range": [[0, 1]],
    "flow.boundary": [0, 0.5],
    "validation.num_clips": [1],
    "conditions.t2v": [0.5],
    "conditions.i2v_head": [1, 7.5],
    "conditions.i2v_loop": [1],
    "conditions.i2v_tail": [1],
    "sample_captions": [["a clip"], []],
    "trackers": [[], ["tensorboard"]],
    "flow.caption_drop": [0, 0.99],
    "flow.sample_steps": [1, 3],
    "flow.guidance": [0.0, 1.0, -2.5, 7],
    "flow.frame_guidance": [1.0],
    "optim.lr": [0, 1e-12, 1e-3],
    "optim.algorithm": ["adamw", "muon"],
    "optim.betas": [[0.0, 0.0], [0.9, 0.9999]],
    "optim.eps": [1e-30, 1.0],
    "optim.weight_decay": [0, 1.0],
    "optim.schedule": ["constant", "cosine"],
    "optim.warmup_steps": [0, 1, HUGE],
    "optim.clip_norm": [0, 1e-9, 1e9],
    "optim.skip_factor": [0, 1e-9, 1e9],
    "optim.accumulation": [1, 2],
    "optim.ema_decay": [0.0, 0.5, 0.99999],
    "model.class_name": [
        "WanTransformer3DModel",
        "SkyReelsV2Transformer3DModel",
        "ChronoEditTransformer3DModel",
    ],
    "model.config.num_layers": [1, 3],
    "model.config.ffn_dim": [1, 7],
    "model.config.eps": [1e-5],
    "model.config.cross_attn_norm": [False, True],
    "model.config.patch_size": [[1, 2, 2], [1, 1, 2], [1, 1, 1]],
    "plan.checkpoint": ["none", "full", "selective"],
    "plan.mlp_chunks": [1, 2, 7, HUGE],
    "plan.precision": ["fp32", "bf16", "fp64"],
    "resume": ["", "auto"],
}
"""Values that one rank trains a step with, alone and together."""

BAD: dict[str, list[Any]] = {
    "output": ["", "\0", "/dev/null", "/dev/null/run", "x" * 300, 3],
    "steps": [0, -1, 1.5, "3", None, True, NAN, []],
    "seed": [-1, 2**63, 0.5, "x", NAN],
    "log_every": [0, -1, 0.5],
    "save_every": [0, -HUGE, "often"],
    "keep_checkpoints": [0, -1, 1.5],
    "num_samples": [-1, 0.5, "two"],
    "memory_target_gib": [-1, NAN, INF, 8.0],
    "watch": [-1, 0.5, "yes"],
    "timeout_s": [-1, NAN, INF, 1e30, "soon"],
    "bucket_plans": [{"9x24x40": {"checkpoint": "full"}}, 3],
    "cache_folder": ["cache", "/dev/null", "\0", 3],
    "resume": ["/nowhere", "newest", "/dev/null", "\0", 3],
    "data.folder": ["", "/nowhere", "/dev/null", "\0", 3, ["a"], "y" * 300],
    "data.folders": [{"/nowhere": 1}, {"a": 0}],
    "data.regularisation": [["a"]],
    "data.masks": ["/nowhere"],
    "data.controls": ["/nowhere"],
    "data.references": ["/nowhere"],
    "data.num_references": [2],
    "data.reference_side": [32],
    "data.num_frames": [0, 1.5, HUGE, NAN],
    "data.frame_stride": [0, 10_000, HUGE],
    "data.height": [0, -8, 12, 8 * HUGE, "tall"],
    "data.width": [0, 7, 12, 8 * HUGE, None],
    "data.buckets": ["9x48x80", ["9x48"], ["0x8x8"], ["9x24x40"], [3]],
    "data.batch_size": [0, -1, 10**30],
    "data.num_workers": [-1, 10**6, HUGE, 0.5],
    "data.frame_rate": [-1.0, NAN, 24.0],
    "data.packed_tokens": [7],
    "codec.patch": [0, 3, 5, HUGE, 1.5],
    "codec.path": ["/nowhere", "/dev/null", "\0", 3],
    "text.path": ["/nowhere", "/dev/null", "\0"],
    "text.length": [0, -1, 1, HUGE, 1.5],
    "text.width": [0, 7, HUGE, 32.5],
    "text.path_2": ["/nowhere"],
    "text.dtype": ["fp32", "fp16"],
    "text.cache": ["yes"],
    "codec.dtype": ["fp32", "fp64"],
    "codec.cache": [True],
    "lora.kind": ["dora"],
    "lora.rank": [HUGE],
    "lora.alpha": [1.0],
    "lora.factor": [3],
    "lora.base": ["nf4"],
    "lora.targets": [["to_q"]],
    "lora.path": ["/nowhere"],
    "lora.path_2": ["/nowhere"],
    "flow.shift": [0, NAN, "many", True],
    "flow.time_distribution": ["normal", None],
    "flow.time_range": [[0.9, 0.1], [0.5, 1.5]],
    "flow.boundary": [1],
    "validation.num_clips": [-1],
    "validation.every": [0],
    "validation.num_times": [0],
    "flow.logit_mean": [NAN],
    "flow.logit_std": [0, -1, NAN],
    "flow.diffusion_forcing": ["frames"],
    "flow.ar_step": [1],
    "flow.causal_block_size": [-1],
    "flow.addnoise_condition": [NAN],
    "flow.sample_frames": [97],
    "flow.overlap_history": [17],
    "flow.weighting": ["sigma"],
    "flow.min_snr": [1.0],
    "flow.huber": [-1],
    "flow.noise_offset": [NAN],
    "conditions.t2v": [-1, 0, NAN, "often"],
    "conditions.i2v_head": [-1, INF],
    "conditions.i2v_tail": [NAN],
    "conditions.i2v_loop": ["x"],
    # Clips have fewer frames than these give.
    "conditions.v2v_head": [-0.5, 1],
    "conditions.v2v_tail": [HUGE],
    "conditions.v2v_head_easy": [-1, 0.1],
    "conditions.v2v_tail_easy": [1],
    "conditions.learn_given": ["often"],
    "sample_every": [-1, 0.5, 2],
    "image.path": ["nowhere", "\0"],
    "codec.sound_path": ["nowhere"],
    "image.width": [8, 12],
    "image.dtype": ["bf16"],
    "image.cache": [True],
    "sample_captions": ["one", [3]],
    "trackers": ["tensorboard", ["mlflow"], ["tensorboard", "tensorboard"]],
    "tracker_project": ["", "clips", 3],
    "flow.caption_drop": [-0.1, 1, NAN, INF, "few"],
    "flow.sample_steps": [0, HUGE, 1.5],
    "flow.guidance": [NAN, -INF],
    "flow.frame_guidance": [3.0],
    "optim.lr": [-1, NAN, INF, [1e-3]],
    "optim.betas": [[0.9], [0.9, 1.0], [-0.1, 0.9], [NAN, 0.9], [0.9, INF], 0.9],
    "optim.eps": [0, -1e-8, NAN, INF],
    "optim.state": ["2bit", 8, None],
    "optim.weight_decay": [-0.1, NAN],
    "optim.algorithm": ["prodigy"],  # at a learning rate of AdamW
    "optim.schedule": ["linear", 3],
    "optim.warmup_steps": [-1, 0.5, NAN],
    "optim.clip_norm": [-1, INF],
    "optim.skip_factor": [-1, NAN, INF],
    "optim.accumulation": [0, -1, HUGE, 1.5],
    "optim.ema_decay": [-0.1, 1.0, NAN],
    "model.class_name": ["", "nowhere:MMDiTModel", "MochiTransformer3DModel", "os.system", 3],
    "model.path": ["/nowhere", "/dev/null"],
    "model.path_2": ["/nowhere"],
    "model.config.num_layers": [0, -1, 1.5, "2", None, 10**7, NAN, [2]],
    "model.config.num_attention_heads": [0, -3, 10**9, HUGE, "x"],
    "model.config.attention_head_dim": [0, 1, -1, 10**9, 1.5],
    "model.config.ffn_dim": [0, -1, HUGE, 10**18, "x"],
    "model.config.freq_dim": [0, 10**9, 10**18, 1.5],
    "model.config.rope_max_seq_len": [0, 1, -1, 2, 10**18],
    "model.config.patch_size": [
        2,
        [2, 2],
        [1, 2, 2, 2],
        [0, 2, 2],
        [1, -2, 2],
        [1, 2, NAN],
        [1, 7, 7],
        [2, 2, 2],
        [],
    ],
    "model.config.eps": [NAN, INF, "x"],
    "model.config.in_channels": [0, 3, 10**9],
    "model.config.text_dim": [7, 0],
    "model.config.qk_norm": [3, True],
    "model.config.image_dim": [1.5, "x"],
    "model.config.no_such": [1],
    "plan.ulysses": [0, -1, 2, HUGE, 1.5, "two"],
    "plan.ring": [0, 3, HUGE],
    "plan.tp": [0, 2],
    "plan.dp_shard": [0, 2],
    "plan.dp_replicate": [0, 4, 10**30],
    "plan.checkpoint": ["some", 1],
    "plan.offload": [-0.1, 1.1, NAN, INF, "auto", 0.5, "some"],
    "plan.mlp_chunks": [0, -1, 1.5],
    "plan.overlap_ulysses": [True],
    "plan.sharding": ["zero1", 3, "HYBRID_SHARD"],
    "plan.sharding_factor": [0, -1, 2, 1.5, "two"],
    "plan.prefetch": [-1, 0.5, "some"],
    "plan.cpu_offload": [True, "some"],
    "plan.precision": ["fp16", 16],
    "plan.reduce_dtype": ["bf16"],
    "plan.gather_dtype": ["int8"],
    "plan.two_level": ["on"],
    "plan.ranks_per_node": [1],
    "no_such": [1],
    "optim.no_such": [1],
    "optim": [3, [], None],
}
"""Values that are refused, whatever the others are."""


def configurations(seed: int, number: int) -> list[Case]:
    """Half of them good; every value comes once, where `number` is twice that of the good or the bad ones."""
    chosen = random.Random(seed)
    bad = [(name, value) for name, values in BAD.items() for value in values]
    good = [(name, value) for name, values in GOOD.items() for value in values]
    chosen.shuffle(bad)
    chosen.shuffle(good)
    cases = []
    for count in range(number):
        changes = dict(chosen.sample(good, chosen.randint(0, 2)))
        if count % 2:
            name, value = good[count // 2 % len(good)]
        else:
            name, value = bad[count // 2 % len(bad)]
            # A table that is no table has no options beside it.
            changes = {key: given for key, given in changes.items() if not key.startswith(f"{name}.")}
        cases.append(Case({**_fitting(changes, name), name: value}, bool(count % 2)))
    return cases


def _fitting(changes: dict[str, Any], name: str) -> dict[str, Any]:
    """Without options that only fit certain values of the one that is tried."""
    together = {"codec.patch", "data.height", "data.width", "model.config.patch_size", "data.num_frames"}
    strides = {"data.num_frames", "data.frame_stride"}
    # An image has no frame to spare.
    given = {"conditions.i2v_head", "conditions.i2v_loop", "conditions.i2v_tail"}
    if name in given:
        changes = {key: value for key, value in changes.items() if key != "data.num_frames"}
    return {
        key: value
        for key, value in changes.items()
        if key != name
        # Where frames are given of every clip, captions alone may train none.
        and not (name == "conditions.t2v" and key in given)
        # What waits on the host is the input of a block that is recomputed.
        and not (name == "plan.offload" and key == "plan.checkpoint")
        # Without adapters nothing may be said of them.
        and not (name.startswith("lora.") and key == "lora.rank")
        and not {key, name} <= together
        and not {key, name} <= strides
        and not (key in given and "data.num_frames" in {name, *changes})
    }


# Damaged videos


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _flip_a_bit(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _overwrite(content: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(content)), rng.randint(1, 200)
    return content[:place] + rng.randbytes(length) + content[place + length :]


def _zero_a_block(content: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(content)), rng.randint(1, 4096)
    return content[:place] + bytes(min(length, len(content) - place)) + content[place + length :]


def _drop_a_block(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + content[place + rng.randint(1, 500) :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + rng.randbytes(rng.randint(1, 500)) + content[place:]


def _behead(content: bytes, rng: random.Random) -> bytes:
    return content[rng.randint(1, 64) :]


def _append(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.randint(1, 5000))


def _twice(content: bytes, rng: random.Random) -> bytes:
    return content + content


def _noise(content: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, 5000))


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(_cut, _flip_a_bit, _overwrite, _zero_a_block, _drop_a_block, _insert, _behead, _append, _twice, _noise)
]


def damaged_videos(
    folder: Path, originals: list[Path], seed: int, number: int
) -> Iterator[tuple[Path, str, Path]]:
    """Files of which each is damaged in one way: its path, the way, and the whole video that it was."""
    rng = random.Random(seed)
    ways = [(damage, original) for damage in DAMAGES for original in originals]
    for count in range(number):
        damage, original = ways[count % len(ways)]
        path = folder / f"{count}{original.suffix}"
        path.write_bytes(damage(original.read_bytes(), rng))
        yield path, damage.__name__.strip("_"), original


def impossible_videos(folder: Path, original: Path) -> dict[str, Path]:
    """Files that no damage of a video gives: none of them can be decoded."""
    paths = {
        "empty.mp4": b"",
        "zeros.mp4": bytes(10_000),
        "text.mp4": b"not a video\n" * 100,
        "page.mp4": b"<!DOCTYPE html><html><body>404</body></html>",
        "playlist.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{original}\n#EXT-X-ENDLIST\n".encode(),
        "concat.mp4": f"ffconcat version 1.0\nfile {original}\n".encode(),
        "archive.mp4": b"PK\x03\x04" + bytes(500),
        "picture.mp4": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "lfs.mp4": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    }
    for name, content in paths.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.mp4")
    (folder / "folder.mp4").mkdir()
    (folder / "dangling.mp4").symlink_to(folder / "nothing.mp4")
    (folder / "loop.mp4").symlink_to(folder / "loop.mp4")
    (folder / "device.mp4").symlink_to("/dev/zero")
    others = (
        "pipe.mp4",
        "folder.mp4",
        "dangling.mp4",
        "loop.mp4",
        "device.mp4",
        "missing.mp4",
        "l" * 300 + ".mp4",
    )
    return {name: folder / name for name in (*paths, *others)}
