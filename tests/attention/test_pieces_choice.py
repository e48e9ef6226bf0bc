"""Which kernel takes all pieces of a block of keys at once, and why not those before it."""

import pytest
import torch

from opensora_accel.attention import explain_kernel
from opensora_accel.attention.kernels import Problem, choose, choose_for_pieces, choose_kernel, flex, releases
from opensora_accel.attention.kernels.flex import FlexKernel
from opensora_accel.attention.kernels.magi import MagiKernel
from opensora_accel.attention.slices import AttentionSlices, Pieces, Slice
from tests.attention import flash_attn_releases, magi_releases
from tests.attention.reference import random_inputs
from tests.attention.test_sliced import MASKS


@pytest.fixture
def hopper(monkeypatch):
    """All libraries are there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(flex, "_unfit_compiler", lambda: None)
    cached = choose_kernel, choose_for_pieces, releases.find_release
    for each in cached:
        each.cache_clear()
    yield monkeypatch
    for each in cached:
        each.cache_clear()


ON_GPU = Problem(torch.device("cuda", 0), torch.bfloat16, 128, 128, False, False, False)
FACTS = {
    "packed": AttentionSlices.packed([700, 500, 300]),
    "captions": AttentionSlices.packed([700, 500], [20, 60]),
    "packed, causal": AttentionSlices(
        900,
        900,
        (Slice.of(range(400), range(400), "causal"), Slice.of(range(400, 900), range(400, 900), "causal")),
    ),
    "block causal": AttentionSlices.block_causal(6, 200, block_frames=2),
    "sliding": AttentionSlices.sliding(3, 20, 8, (1, 12, 4), tile=(1, 4, 4)),
    "bands": AttentionSlices(900, 900, (Slice.of(range(800), range(820), "band"),)),
    "large": AttentionSlices.block_causal(4, 3000, block_frames=1),
    "one tile": AttentionSlices.full(500),
}
VARLEN, FLEX, TILES = "aten flash, varlen", "flex attention", None


@pytest.mark.parametrize(
    ("name", "without", "with_flash", "with_magi"),
    [
        ("packed", VARLEN, "flash-attn 3, varlen", "MagiAttention"),
        ("captions", VARLEN, "flash-attn 3, varlen", "MagiAttention"),
        ("packed, causal", VARLEN, "flash-attn 3, varlen", "MagiAttention"),
        ("block causal", FLEX, FLEX, "MagiAttention"),
        ("sliding", FLEX, FLEX, "MagiAttention"),
        ("bands", FLEX, FLEX, "MagiAttention"),
        ("large", TILES, TILES, "MagiAttention"),
        ("one tile", TILES, TILES, TILES),
    ],
)
def test_the_choice_by_kind_of_mask(hopper, name, without, with_flash, with_magi):
    """docs/attention.md has this table."""
    facts = Pieces(FACTS[name].slices).facts
    found = []
    for release in (None, "flash", "magi"):
        if release == "flash":
            flash_attn_releases.install(hopper, "2.8")
            flash_attn_releases.install(hopper, "3, operators")
        elif release == "magi":
            magi_releases.install(hopper)
        for cached in (choose_for_pieces, choose_kernel, releases.find_release):
            cached.cache_clear()
        kernel = choose_for_pieces(ON_GPU, facts).kernel
        found.append(None if kernel is None else kernel.name)
    assert found == [without, with_flash, with_magi]


@pytest.mark.parametrize(
    ("mask", "changes", "kernel", "reason"),
    [
        ("block causal", {}, "aten flash, varlen", "pieces have queries or keys in common"),
        ("bands", {}, "aten flash, varlen", "it knows full and causal pieces, and some are band"),
        ("packed", {"masked": True}, "aten flash, varlen", "it takes no key mask"),
        (
            "packed",
            {"dtype": torch.float32},
            "aten flash, varlen",
            "it takes torch.float16 or torch.bfloat16",
        ),
        (
            "packed",
            {"head_dim": 264, "value_dim": 264},
            "aten flash, varlen",
            "a head dim of at most 256, not 264",
        ),
        ("packed", {"dtype": torch.float64}, "flex attention", "it takes torch.float32, torch.float16"),
        (
            "packed",
            {"head_dim": 8, "value_dim": 8, "masked": True},
            "flex attention",
            "head dims from 16 to 256, not 8",
        ),
        ("packed", {"masked": True}, "MagiAttention", "it takes no key mask"),
        ("packed", {"head_dim": 192, "value_dim": 192}, "MagiAttention", "up to 128, not 192, 192"),
        (
            "packed",
            {"device": torch.device("cpu")},
            "MagiAttention",
            "it runs on CUDA, the tensors are on cpu",
        ),
        ("packed", {"dtype": torch.float32}, "MagiAttention", "it takes fp16 or bf16, not torch.float32"),
        ("packed", {}, "MagiAttention", "magi_attention.functional.flex_flash_attn cannot be imported"),
        ("packed", {}, "flash-attn 3, varlen", "flash_attn_interface cannot be imported"),
        ("large", {}, "flex attention", "pairs on average, for which a call of cuDNN for each is quicker"),
    ],
)
def test_refusals(hopper, mask, changes, kernel, reason):
    choice = choose_for_pieces(ON_GPU._replace(**changes), Pieces(FACTS[mask].slices).facts)
    assert reason in dict(choice.refused)[kernel]


def test_flex_attention_says_how_many_runs_are_too_many(hopper):
    many = tuple(Slice.of(range(10), range(2 * n, 2 * n + 1)) for n in range(17))
    facts = Pieces(many).facts
    assert FlexKernel().refuses(ON_GPU, facts) == "a query has 17 runs of keys, of which 16 can be looked up"
    assert FlexKernel().refuses(ON_GPU, Pieces(many[1:]).facts) is None


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((7, 5), {"flex attention": "it needs an Ampere GPU or a newer one"}),
        ((10, 0), {"MagiAttention": "it runs on Hopper"}),
    ],
)
def test_what_older_and_newer_gpus_lack(hopper, capability, names):
    hopper.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    magi_releases.install(hopper)
    choice = choose_for_pieces(ON_GPU._replace(dtype=torch.float16), Pieces(FACTS["bands"].slices).facts)
    assert {name: dict(choice.refused)[name] for name in names} == names


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("triton", "it is compiled by Triton, which is not installed"),
        (
            "compiler",
            "Triton needs a C compiler, and there is no gcc or clang; name one in the environment variable CC",
        ),
        ("compile", "torch.compile is turned off by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE"),
    ],
)
def test_flex_attention_needs_a_compiler(monkeypatch, lacks, reason):
    monkeypatch.setattr(
        flex.importlib.util, "find_spec", lambda _name: None if lacks == "triton" else object()
    )
    monkeypatch.setattr(flex.shutil, "which", lambda _name: None if lacks == "compiler" else "/usr/bin/gcc")
    monkeypatch.delenv("CC", raising=False)
    if lacks == "compile":
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert flex._unfit_compiler() == reason


@pytest.mark.parametrize("leave_out", ["q_ranges", "out_type"])
def test_an_unknown_release_of_magi_is_refused(hopper, leave_out):
    magi_releases.install(hopper, leave_out=leave_out)
    reason = MagiKernel().refuses(ON_GPU, Pieces(FACTS["packed"].slices).facts)
    assert reason == (
        f"magi-attention 1.1.1 has another interface: its forward has no parameter {leave_out}; install MagiAttention "
        "1.0.5, 1.1.0 or 1.1.1"
    )


def test_the_choice_is_explained(hopper):
    q, k, v, _ = random_inputs(17, 17, 2, 2, False)
    text = str(explain_kernel(q, k, v, slices=MASKS["packed"]))
    assert text.startswith(
        "aten flash (CPU), a call for each of 4 tiles (not MagiAttention: it runs on CUDA, "
    )
    assert "not flex attention: it runs on CUDA, the tensors are on cpu; " in text
    single = AttentionSlices.full(17)
    assert str(explain_kernel(q, k, v, slices=single)).startswith("aten flash (CPU) (not flash-attn 3: ")
    with pytest.raises(ValueError, match="the slices are of 13 queries and 13 keys"):
        explain_kernel(q, k, v, slices=MASKS["causal"])
    magi_releases.install(hopper)
    told = str(choose.explain_pieces(ON_GPU, Pieces(FACTS["bands"].slices).facts))
    assert told == "MagiAttention (magi-attention 1.1.1, functions)"
