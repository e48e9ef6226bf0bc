"""Why a model that has no policy cannot have one of what there is: the fact, on one device, with its number."""

import torch
from diffusers.models.transformers.transformer_sana_wm import (
    SanaWMBidirectionalGDNAttention,
    SanaWMTemporalShortConvolution,
)

from tests.tolerances import relative_error
from tests.video_models.case import randn

FRAMES, SPACE, HEADS, SIZE = 6, 4, 3, 8


def gated_delta_rule(heads=slice(None), order=None):
    """SANA-WM's recurrence over a clip, whose frames before the last two come in this order: [B, S, H, D]."""
    order = list(range(FRAMES)) if order is None else order
    frames = torch.tensor(order)
    shape = 1, FRAMES, SPACE, HEADS, SIZE
    # Queries stay where they are; keys, values and gates of frames are exchanged.
    q = randn(*shape).relu().flatten(1, 2)[:, :, heads]
    k, v = (
        tensor[:, frames].flatten(1, 2)[:, :, heads]
        for tensor in (randn(*shape, seed=2).relu(), randn(*shape, seed=3))
    )
    beta = randn(1, HEADS, FRAMES, SPACE, seed=4).sigmoid()[:, heads, frames]
    decay = randn(1, HEADS, FRAMES, seed=5).sigmoid()[:, heads, frames]
    attention = SanaWMBidirectionalGDNAttention()
    out = attention(q, k, v, beta, decay, torch.zeros(1), FRAMES)
    return out.unflatten(2, (-1, SIZE))


def last_frame(out):
    return out[:, -SPACE:]


def test_sana_wm_s_state_is_no_sum_over_tokens():
    """Two frames change places long before the last one. A sum would not notice; this state does.

    So ranks cannot add up what they have of it, as those of SANA-Video's linear attention do.
    """
    kept, exchanged = (gated_delta_rule(order=order) for order in ([0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5]))
    assert relative_error(last_frame(exchanged), last_frame(kept)) > 0.01


def test_sana_wm_s_heads_have_states_of_their_own():
    """Tokens exchanged for heads would be exact: a rank's heads alone are the heads of one device."""
    whole = gated_delta_rule()
    for heads in (slice(0, 2), slice(2, 3)):
        assert torch.equal(gated_delta_rule(heads=heads), whole[:, :, heads])


def test_sana_wm_s_keys_are_mixed_over_frames_before_they_are_keys():
    """So a rank's first and last frames need three of its neighbours', in a convolution that is no `nn.Conv`."""
    convolution = SanaWMTemporalShortConvolution(HEADS * SIZE, kernel_size=4)
    torch.nn.init.normal_(convolution.weight, generator=torch.Generator().manual_seed(6))
    keys = randn(1, 10 * SPACE, HEADS * SIZE)
    with torch.no_grad():
        before = convolution(keys, 10)
        keys[:, 5 * SPACE : 6 * SPACE] += 1
        moved = (convolution(keys, 10) != before).any(-1).view(10, SPACE).all(1)
    assert moved.nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]
