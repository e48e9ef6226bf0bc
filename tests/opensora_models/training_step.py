"""A training step as loops of Open-Sora write it, against `opensora.acceleration`: sequence parallelism by hand.

`test_drop_in.py` runs it as it stands, behind `opensora_accel.install_as("opensora.acceleration")`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opensora.acceleration.checkpoint import auto_grad_checkpoint, set_grad_checkpoint
from opensora.acceleration.communications import (
    all_to_all,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora.acceleration.parallel_states import (
    get_data_parallel_group,
    get_sequence_parallel_group,
    set_data_parallel_group,
    set_sequence_parallel_group,
)
from opensora.acceleration.shardformer.modeling.t5 import T5LayerNorm
from opensora.acceleration.shardformer.policy.t5_encoder import T5EncoderPolicy


class SeqParallelAttention(torch.nn.Module):
    """The attention of a spatial block: heads for tokens, attention over whole frames, tokens for heads."""

    def __init__(self, attention):
        super().__init__()
        self.inner = attention

    def forward(self, x):
        attn, group = self.inner, get_sequence_parallel_group()
        B, N, C = x.shape
        qkv = attn.qkv(x)  # [B, N/P, 3·C]
        qkv = qkv.view(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 1, 3, 4).flatten(0, 1)
        qkv = all_to_all(qkv, group, scatter_dim=2, gather_dim=1)
        q, k, v = qkv.view(3, B, *qkv.shape[1:]).transpose(2, 3).unbind(0)
        q, k = attn.q_norm(q), attn.k_norm(k)
        out = F.scaled_dot_product_attention(q, k, v, scale=attn.scale).transpose(1, 2)
        out = all_to_all(out, group, scatter_dim=1, gather_dim=2)
        return attn.proj(out.view(B, N, C))  # as v1.3 writes it: of a contiguous tensor


def run_stdit3(model, x, t_mlp, y, y_lens, T, S):
    """The blocks of STDiT3 as its forward runs them: split along the places of a frame, gathered behind."""
    group = get_sequence_parallel_group()
    x = split_forward_gather_backward(x.unflatten(1, (T, S)), group, dim=2, grad_scale="down")
    own = x.shape[2]
    x = x.flatten(1, 2)
    for spatial_block, temporal_block in zip(model.spatial_blocks, model.temporal_blocks, strict=True):
        x = auto_grad_checkpoint(spatial_block, x, y, t_mlp, y_lens, None, None, T, own)
        x = auto_grad_checkpoint(temporal_block, x, y, t_mlp, y_lens, None, None, T, own)
    x = gather_forward_split_backward(x.unflatten(1, (T, own)), group, dim=2, grad_scale="up")
    return x.flatten(1, 2)


def train_step(model, inputs, sequence_group, data_group):
    """Loss and averaged gradients; `inputs` are those of `run_stdit3`."""
    set_sequence_parallel_group(sequence_group)
    set_data_parallel_group(data_group)
    set_grad_checkpoint(model)
    for block in model.spatial_blocks:
        block.attn = SeqParallelAttention(block.attn)
    loss = run_stdit3(model, **inputs).square().mean()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=get_data_parallel_group())
            parameter.grad /= get_data_parallel_group().size()
    return loss


def swap_norms_of_text_encoder(encoder):
    """What its loader does of a policy by hand: every T5 norm in plain torch, on the same weights."""
    assert T5EncoderPolicy is not None
    for module in encoder.modules():
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("FusedRMSNorm", "T5LayerNorm"):
                setattr(module, name, T5LayerNorm.from_native_module(child))
    return encoder
