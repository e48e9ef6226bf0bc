"""HunyuanVideo 1.5 (diffusers `HunyuanVideo15Transformer3DModel`), text- and image-to-video."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput, SplitOutput

HUNYUAN_VIDEO15 = Policy(
    models=("HunyuanVideo15Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask timestep_r "
        "encoder_hidden_states_2 encoder_attention_mask_2 image_embeds attention_kwargs return_dict"
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0),),
    split_inputs=(SplitInput("transformer_blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn", text="last"),),
    unpacked="a call has one time for all of its tokens, and reads its captions as one",
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
