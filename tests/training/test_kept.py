"""What runs keep in a folder: found again exactly where it is the same, computed where anything differs."""

import dataclasses
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora_accel import Plan
from opensora_accel.training import codec, stored, text_encoders
from opensora_accel.training.clips import Clip, VideoFolder
from opensora_accel.training.codec import build_codec
from opensora_accel.training.conditions import KINDS, Conditioning
from opensora_accel.training.config import TrainConfig, config_from_dict
from opensora_accel.training.disk_cache import DiskCache, entries
from opensora_accel.training.kept import CachedLatents, KeptPictures, StoredCaptions
from opensora_accel.training.pictures import build_picture_encoder
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sections import ImageConfig, TextConfig
from opensora_accel.training.stored import EncoderFiles, Stored, open_disk_cache
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from opensora_accel.training.video import Video, probe
from tests.tiers import PROVE, some
from tests.training.language import gemma3, saved_pair
from tests.training.runs import tiny_config
from tests.training.test_disk_cache import rewrite_in_place
from tests.training.test_pictures import saved_image_encoder
from tests.training.test_pretrained import vae
from tests.training.test_text import CAPTIONS, built, saved_encoder

CPU = torch.device("cpu")
WORDS = " ".join(CAPTIONS).split()


def change_a_weight(folder):
    """One weight of one tensor, in place, keeping size and time of the file."""
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = sorted(name for name, tensor in weights.items() if tensor.ndim > 1)[0]
    weights[name].view(-1)[0] += 0.5
    changed = path.with_suffix(".new")
    save_file(weights, changed, metadata={"format": "pt"})
    rewrite_in_place(path, changed.read_bytes())
    changed.unlink()


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    """Videos and encoders of clips, captions and pictures, in versions that differ from the first by a small change."""
    from opensora_accel.training.tiny_run import write_clips

    folder = tmp_path_factory.mktemp("materials")
    clips = write_clips(folder / "clips", num_videos=2, num_frames=12)
    names = sorted(path.name for path in clips.glob("*.mp4"))
    videos = [(clips / name).read_bytes() for name in names]
    # Of one size, by a box of nothing at the end.
    sizes = [8 + max(map(len, videos)) - len(content) for content in videos]
    videos = [
        content + size.to_bytes(4, "big") + b"free" + bytes(size - 8)
        for content, size in zip(videos, sizes, strict=True)
    ]
    vae("AutoencoderKLWan").save_pretrained(folder / "vae_a")
    saved_encoder("t5", folder / "text_a", folder / "text_a")
    for kind in ("vae", "text"):
        shutil.copytree(folder / f"{kind}_a", folder / f"{kind}_b")
    change_a_weight(folder / "vae_b")
    change_a_weight(folder / "text_b")
    # A VAE of other statistics: its weights are the same.
    shutil.copytree(folder / "vae_a", folder / "vae_config")
    config = json.loads((folder / "vae_config" / "config.json").read_text())
    (folder / "vae_config" / "config.json").write_text(json.dumps({**config, "latents_mean": [0.2] * 4}))
    # Saved by another version under another name: what it computes is the same.
    shutil.copytree(folder / "vae_a", folder / "vae_copy")
    (folder / "vae_copy" / "config.json").write_text(
        json.dumps({**config, "_diffusers_version": "0.0", "_name_or_path": "elsewhere"})
    )
    # Another tokenizer, which gives other tokens, and one whose files alone differ.
    for name in ("text_words", "text_copy"):
        shutil.copytree(folder / "text_a", folder / name)
    tokenizer = built(TextConfig(width=32), train_tokenizer([word[::-1] for word in WORDS])).tokenizer
    tokenizer.save_pretrained(folder / "text_words")
    settings = folder / "text_copy" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "of_no_meaning": 1}))
    saved_image_encoder(folder / "image_a")
    for name in ("image_b", "image_crop", "image_copy"):
        shutil.copytree(folder / "image_a", folder / name)
    change_a_weight(folder / "image_b")
    # Another preparation of pictures, and another file with the same settings.
    for name, change in (("image_crop", {"do_normalize": False}), ("image_copy", {})):
        settings = folder / name / "preprocessor_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **change}))
    return folder, videos


IN_GREY = Conditioning("channels", "frames", others="grey")
CHOICES = {
    "content": [0, 1],
    "file": ["one.mp4", "another name.mp4"],
    "start": [0, 1, 2],
    "num_frames": [5, 1],
    "stride": [1, 2],
    "height": [16, 24],
    "width": [16, 24],
    # What is given, and how it is encoded.
    "given": [
        (KINDS["i2v_head"], IN_GREY),
        None,
        (KINDS["i2v_loop"], IN_GREY),
        (KINDS["i2v_loop"], dataclasses.replace(IN_GREY, others="black")),
        (KINDS["i2v_head"], Conditioning("latents")),
    ],
    "vae": ["vae_a", "vae_b", "vae_config", "vae_copy"],
    "vae_dtype": ["fp32", "bf16"],
    "caption": CAPTIONS,
    "text": ["text_a", "text_b", "text_words", "text_copy"],
    "length": [12, 20],
    "text_dtype": ["fp32", "bf16"],
    "image": ["image_a", "image_b", "image_crop", "image_copy"],
    "image_dtype": ["fp32", "bf16"],
}
# What is no other value: a copy of a file, or of a folder, that computes the same.
SAME = {"vae_copy": "vae_a", "text_copy": "text_a", "image_copy": "image_a"}
OF_LATENTS = ("content", "start", "num_frames", "stride", "height", "width", "given", "vae", "vae_dtype")
OF_EMBEDDINGS = ("caption", "text", "length", "text_dtype")
OF_PICTURES = ("content", "start", "height", "width", "image", "image_dtype")


class World:
    """What a run of given choices asks of the folder, with how often it found it, against computing it afresh."""

    def __init__(self, materials, tmp_path):
        self.folder, self.videos = materials
        self.clips, self.cache = tmp_path / "clips", DiskCache(tmp_path / "cache")
        self.clips.mkdir()
        self._codecs, self._encoders, self._pictures = {}, {}, {}

    def config(self, chosen) -> TrainConfig:
        return config_from_dict(
            {
                "data": {
                    "folder": str(self.clips), "num_frames": chosen["num_frames"],
                    "frame_stride": chosen["stride"], "height": chosen["height"], "width": chosen["width"],
                },
                "codec": {"path": str(self.folder / chosen["vae"]), "dtype": chosen["vae_dtype"]},
                "text": {
                    "path": str(self.folder / chosen["text"]), "length": chosen["length"],
                    "dtype": chosen["text_dtype"],
                },
            },
            "the test",
        )  # fmt: skip

    def write(self, chosen):
        """The video, in place where there is one of this name: only its content changes."""
        path, content = self.clips / chosen["file"], self.videos[chosen["content"]]
        if not path.exists():
            path.write_bytes(content)
        else:
            rewrite_in_place(path, content)
        return path

    def latents(self, chosen):
        """What is found or computed, what is computed afresh, and whether it was found."""
        path, config = self.write(chosen), self.config(chosen)
        name = (chosen["vae"], chosen["vae_dtype"])
        if name not in self._codecs:
            self._codecs[name] = build_codec(config.codec, CPU, torch.float32)
        codec, sample = self._codecs[name], self.sample(path, config, chosen)
        common = Stored.latents(self.cache, config, CPU)
        given, conditioning = chosen["given"] or (None, None)
        kept = {"in_memory": False, "stored": common, "conditioning": conditioning}
        cached = CachedLatents(codec, lambda: codec, [], **kept)
        hits = self.cache.counts.hits
        clip = Clip(sample.file, chosen["start"], config.data.sizes[0], sample.digests.file)
        frames = sample.frames[None]
        found = cached.encode(frames, [clip], [given])
        fresh = codec.encode(frames) if given is None else conditioning.encode(codec, frames, [given])
        return found, fresh, self.cache.counts.hits > hits

    def sample(self, path, config, chosen):
        folder = VideoFolder(
            [Video(path.name, "", probe(path), config.data.sizes[0])], config.data, seed=0, digests=True
        )
        folder.start = lambda video, position: chosen["start"]
        sample = folder[0, 0]
        assert sample.error is None and sample.digests.file is not None
        return sample

    def picture(self, chosen):
        path, config = self.write(chosen), self.config(chosen)
        name = (chosen["image"], chosen["image_dtype"])
        image = ImageConfig(path=str(self.folder / chosen["image"]), dtype=chosen["image_dtype"])
        if name not in self._pictures:
            self._pictures[name] = build_picture_encoder(image, 0, CPU, torch.float32)
        encoder, sample = self._pictures[name], self.sample(path, config, chosen)
        common = Stored.pictures(self.cache, image, CPU)
        kept = KeptPictures(encoder, lambda: encoder, [], in_memory=False, stored=common)
        hits = self.cache.counts.hits
        clip = Clip(sample.file, chosen["start"], config.data.sizes[0], sample.digests.file)
        found = kept.encode(sample.frames[:1], [clip])
        return found, encoder.encode(sample.frames[:1]), self.cache.counts.hits > hits

    def embedding(self, chosen):
        config = self.config(chosen)
        name = (chosen["text"], chosen["text_dtype"], chosen["length"])
        if name not in self._encoders:
            self._encoders[name] = build_text_encoder(config.text, "", 0, CPU, torch.float32)
        encoder, common = self._encoders[name], Stored.embeddings(self.cache, config.text, CPU)
        kept = StoredCaptions(encoder, lambda: encoder, [chosen["caption"]], common)
        hits = self.cache.counts.hits
        found = kept.encode([chosen["caption"]], CPU, torch.float32)
        expected = encoder.encode([chosen["caption"]], CPU, torch.float32)
        return found, expected, self.cache.counts.hits > hits


@pytest.mark.parametrize("number", [10, pytest.param(200, marks=PROVE)])
def test_changes_drawn_at_random_are_never_stale_and_never_lost(materials, tmp_path, number):
    """Each changes one choice of those before; what was computed before is found, and nothing else is."""
    world, rng, seen = World(materials, tmp_path), random.Random(number), set()
    chosen = {name: values[0] for name, values in CHOICES.items()}
    stale, needless, hits, changed = 0, 0, 0, set()
    # Every value of every choice comes, in an order of chance, and then any.
    changes = [(name, value) for name, values in CHOICES.items() for value in values]
    rng.shuffle(changes)
    changes += [(name, rng.choice(CHOICES[name])) for name in rng.choices([*CHOICES], k=number)]
    # Before a copy comes what it is a copy of, which must have been stored for the copy to be found.
    changes = [
        each
        for name, value in changes
        for each in ([(name, SAME[value])] if value in SAME else []) + [(name, value)]
    ]
    for name, value in changes[:number]:
        changed.add(name)
        chosen[name] = value
        for ask, names in (
            (world.latents, OF_LATENTS),
            (world.embedding, OF_EMBEDDINGS),
            (world.picture, OF_PICTURES),
        ):
            state = (ask.__name__, *(SAME.get(chosen[each], chosen[each]) for each in names))
            found, fresh, was_hit = ask(chosen)
            stale += not torch.equal(found, fresh)
            needless += not was_hit and state in seen
            assert was_hit <= (state in seen), f"{name} = {value} is not told apart"
            hits += was_hit
            seen.add(state)
    print(f"{number} changes of {len(changed)} kinds: {hits} hits, {stale} stale, {needless} needless misses")
    assert stale == needless == 0 and hits > 0 and len(changed) > 7


# They carry bytes, options and indices; what they carry is in the key, or is what is stored.
CARRIERS = {
    "opensora_accel.communications.checks",
    "opensora_accel.deferred",
    "opensora_accel.documents",
    "opensora_accel.dtensors",
    "opensora_accel.training.buckets",
    "opensora_accel.files",
    "opensora_accel.weights",
    "opensora_accel.wrapping",
    "opensora_accel.training.config",
    "opensora_accel.training.clips",
    "opensora_accel.training.data",
    "opensora_accel.training.disk_cache",
    "opensora_accel.training.flow",
    "opensora_accel.training.kept",
    "opensora_accel.training.options",
    "opensora_accel.training.sections",
    "opensora_accel.training.stored",
    "opensora_accel.training.ranks",
    "opensora_accel.plan",
}


@pytest.mark.parametrize("what", ["latents", "embedding", "picture"])
def test_all_code_that_decides_values_is_in_the_keys(materials, tmp_path, monkeypatch, what):
    """By the functions of ours that run between the files and what is stored."""
    world, ran, hashed, version = World(materials, tmp_path), set(), set(), stored.code_version
    chosen = {name: values[0] for name, values in CHOICES.items()}

    def note_modules(modules):
        hashed.update(module.__name__ for module in modules)
        return version(modules)

    monkeypatch.setattr(stored, "code_version", note_modules)
    sys.setprofile(lambda frame, event, argument: ran.add(frame.f_globals.get("__name__", "")))
    try:
        getattr(world, what)(chosen)
    finally:
        sys.setprofile(None)
    ours = {name for name in ran if name.split(".")[0] in ("opensora_accel", "shardformer")}
    assert ours - CARRIERS == hashed and len(hashed) > 1


def test_embeddings_are_those_of_their_connectors(tmp_path):
    """What goes through others is computed again."""
    torch.manual_seed(0)
    taken, folders = RECIPES["LTX2VideoTransformer3DModel"].text, {}
    made = gemma3(taken[0], 8, WORDS)
    for option, model in (("path", made.model), ("path_2", made.connectors)):
        folders[option] = str(tmp_path / option)
        model.float().save_pretrained(folders[option])
    config, cache = TextConfig(**folders, length=8, dtype="fp32"), DiskCache(tmp_path / "cache")

    def is_kept():
        asked = []
        stored = Stored.embeddings(cache, config, CPU, taken)
        stored.get_or_compute({}, "a caption", lambda: asked.append(1) or torch.zeros(1))
        return not asked

    assert [is_kept(), is_kept()] == [False, True]
    change_a_weight(tmp_path / "path_2")
    assert [is_kept(), is_kept()] == [False, True]


def test_code_and_versions_are_in_the_keys(materials, tmp_path, monkeypatch):
    world = World(materials, tmp_path)
    chosen = {name: values[0] for name, values in CHOICES.items()}
    for part, value in (("code_version", lambda modules: "another"), ("version", lambda package: "99.0")):
        for ask in (world.latents, world.embedding, world.picture):
            assert ask(chosen)[2] is (part == "version")
            assert ask(chosen)[2]
        with monkeypatch.context() as patch:
            patch.setattr(stored, part, value)
            for ask in (world.latents, world.embedding, world.picture):
                assert not ask(chosen)[2]


def test_a_video_that_changes_while_it_is_read_is_not_stored(materials, tmp_path, monkeypatch):
    from opensora_accel.training import clips

    world = World(materials, tmp_path)
    chosen = {name: values[0] for name, values in CHOICES.items()}
    path, config = world.write(chosen), world.config(chosen)
    read = clips.read_timed_clip

    def read_and_change(*arguments, **options):
        frames = read(*arguments, **options)
        rewrite_in_place(path, world.videos[1])
        return frames

    monkeypatch.setattr(clips, "read_timed_clip", read_and_change)
    folder = VideoFolder(
        [Video(path.name, "", probe(path), config.data.sizes[0])], config.data, seed=0, digests=True
    )
    sample = folder[0, 0]
    assert sample.frames is not None and sample.digests.file is None
    codec = build_codec(config.codec, CPU, torch.float32)
    cached = CachedLatents(
        codec, lambda: codec, [], in_memory=False, stored=Stored.latents(world.cache, config, CPU)
    )
    cached.encode(sample.frames[None], [Clip(sample.file, 0, config.data.sizes[0], sample.digests.file)])
    assert not world.cache.folder.exists(), "nothing was stored"


def test_weights_that_change_during_a_run_end_it(materials, tmp_path):
    folder = shutil.copytree(materials[0] / "vae_a", tmp_path / "vae")
    files = EncoderFiles.read("codec.path", str(folder), codec.VAE_STEM)
    os.utime(folder / "config.json")
    assert files.unchanged(lambda: 3) == 3, "the content is the same"
    change_a_weight(folder)
    with pytest.raises(
        ValueError, match=r"codec\.path .* has changed since this run began.*start the run again"
    ):
        files.unchanged(lambda: 3)


@pytest.mark.parametrize("name", ["file", "file/below", "\0", "x" * 300])
def test_a_path_that_can_be_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_folder .* cannot be a folder .*; name another"):
        open_disk_cache(str(tmp_path / name))


def test_a_run_without_encoders_has_nothing_to_keep():
    with pytest.raises(ValueError, match=r"cache_folder keeps what a VAE .* leave cache_folder out"):
        TrainConfig(cache_folder="cache")


def test_the_small_run_of_a_proof_keeps_nothing(materials, tmp_path):
    from opensora_accel.training.tiny_run import tiny_config as small

    config = tiny_config(
        tmp_path,
        tmp_path / "run",
        cache_folder=str(tmp_path),
        **{"text.path": str(materials[0] / "text_a"), "text.width": 64},
    )
    assert small(config, tmp_path).cache_folder == ""


# Whole runs


def train(config):
    """Losses, models that were loaded before sampling and after it, rows of metrics, and how long it took."""
    from opensora_accel.training.loop import Trainer

    loaded, load = [], codec.load_pretrained

    def watched(cls, make, option, folder, stem, dtype, device, **options):
        if device is not None:
            loaded.append(cls.__name__)
        return load(cls, make, option, folder, stem, dtype, device, **options)

    codec.load_pretrained = text_encoders.load_pretrained = watched
    sampled, write_samples = [], Trainer.write_samples

    def samples(self, tracker):
        sampled.extend(loaded)
        return write_samples(self, tracker)

    Trainer.write_samples = samples
    started = time.perf_counter()
    try:
        losses = Trainer(config).train()
    finally:
        codec.load_pretrained = text_encoders.load_pretrained = load
        Trainer.write_samples = write_samples
    rows = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    return losses, sampled, loaded, rows, time.perf_counter() - started


@pytest.fixture
def small_run(materials, tmp_path):
    from opensora_accel.training.tiny_run import write_clips

    clips = write_clips(tmp_path / "clips", num_videos=5, num_frames=9)
    # In words that the encoder's tokenizer knows.
    lines = [json.dumps({"file": f"{n}.mp4", "caption": CAPTIONS[n % len(CAPTIONS)]}) for n in range(5)]
    (clips / "metadata.jsonl").write_text("\n".join(lines))

    def config(name, plan, **changes):
        return tiny_config(
            clips, tmp_path / name, plan,
            codec={"path": str(materials[0] / "vae_a"), "dtype": "fp32"},
            text={"path": str(materials[0] / "text_a"), "dtype": "fp32", "length": 12},
            data={"folder": str(clips), "num_frames": 9, "height": 32, "width": 48, "batch_size": 2},
            steps=4, **{"num_samples": 1, "flow.sample_steps": 1, "model.config.num_layers": 1, **changes},
        )  # fmt: skip

    return config, tmp_path / "cache"


@pytest.mark.parametrize("plan", some([Plan(dp_replicate=2), Plan(ulysses=2), Plan()]), ids=str)
@pytest.mark.parametrize("memory", some([(False, True), (True, True), (False, False)]), ids=str)
def test_a_warm_run_is_the_same_to_the_bit_and_loads_nothing(ranks, small_run, plan, memory, capsys):
    config, cache = small_run
    in_memory = {"codec.cache": memory[0], "text.cache": memory[1]}
    cached = {"cache_folder": str(cache), **in_memory}
    plain = ranks(plan.world_size, train, config("plain", plan, num_samples=0, **in_memory))
    cold = ranks(plan.world_size, train, config("cold", plan, num_samples=0, **cached))
    stored = {entry.path: entry.path.read_bytes() for entry in entries(cache)}
    warm = ranks(plan.world_size, train, config("warm", plan, **cached))
    assert {entry.path: entry.path.read_bytes() for entry in entries(cache)} == stored
    for (expected, *_), (losses, _, first, *_), (again, before, after, rows, _) in zip(
        plain, cold, warm, strict=True
    ):
        assert losses == expected and again == expected
        assert first and before == [] and after == ["AutoencoderKLWan"], "to decode what was sampled"
        own = 4 * 2 // plan.data * (1 if memory[1] else 2)
        assert sum(row["cache_misses"] for row in rows) == 0
        assert memory[0] or sum(row["cache_hits"] for row in rows) == own
    (line_of_cold, line_of_warm) = (cache / "runs.jsonl").read_text().splitlines()
    assert json.loads(line_of_warm)["misses"] == 0 < json.loads(line_of_cold)["stored"]


def test_states_of_two_encoders_are_kept_each_by_its_own_key(ranks, clips, tmp_path):
    name, cache = "HunyuanVideoTransformer3DModel", tmp_path / "cache"
    recipe = RECIPES[name]
    captions = [f"a gradient of colour number {n}" for n in range(5)]
    saved_pair(
        tmp_path, recipe.text, captions, built(TextConfig(width=32), train_tokenizer(captions)).tokenizer
    )

    def losses(run, **changes):
        changes = {
            "model": {"class_name": name, "config": dict(recipe.tiny)},
            "text": {
                "path": f"{tmp_path}/text_encoder",
                "path_2": f"{tmp_path}/text_encoder_2",
                "length": 96,
            },
            "steps": 2,
            **changes,
        }
        losses, _, loaded, *_ = ranks(1, train, tiny_config(clips, tmp_path / run, **changes))[0]
        return losses, loaded

    plain, loaded = losses("plain")
    assert loaded == ["LlamaModel", "CLIPTextModel"]
    assert losses("cold", cache_folder=str(cache)) == (plain, loaded)
    assert losses("warm", cache_folder=str(cache), **{"text.cache": False}) == (plain, [])


@PROVE
def test_a_run_with_a_damaged_entry_computes_that_one_again(ranks, small_run):
    config, cache = small_run
    ((expected, *_),) = ranks(1, train, config("cold", Plan(), cache_folder=str(cache)))
    paths = sorted(entry.path for entry in entries(cache))
    whole = [path.read_bytes() for path in paths]
    for path in paths[::3]:
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    ((losses, *_),) = ranks(1, train, config("again", Plan(), cache_folder=str(cache)))
    assert losses == expected and [path.read_bytes() for path in paths] == whole


@pytest.mark.prove
def test_a_warm_start_is_faster_than_a_cold_one(ranks, small_run):
    config, cache = small_run
    times = {"cold": [], "warm": []}
    for turn in range(5):
        for kind in times:
            if kind == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            ((*_, seconds),) = ranks(
                1,
                train,
                dataclasses.replace(config(f"{kind}_{turn}", Plan(), cache_folder=str(cache)), num_samples=0),
            )
            times[kind].append(seconds)
    ratios = sorted(warm / cold for warm, cold in zip(times["warm"], times["cold"], strict=True))
    size = sum(entry.size_bytes for entry in entries(cache))
    print(
        f"warm / cold: {ratios[2]:.2f} (median of 5, {ratios[0]:.2f} to {ratios[-1]:.2f}), {size} bytes on disk"
    )
    assert ratios[2] < 1
