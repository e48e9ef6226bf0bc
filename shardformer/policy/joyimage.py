"""JoyImage-Edit and JoyImage-Edit-Plus (diffusers `JoyImageEdit[Plus]Transformer3DModel`), which edit images."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput

# The images to edit stand in one sequence with the noisy one, as if they were frames.
JOYIMAGE_EDIT = Policy(
    models=("JoyImageEditTransformer3DModel",),
    origin=("diffusers",),
    arguments="hidden_states timestep encoder_hidden_states return_dict",
    split_inputs=(
        SplitInput("double_blocks.0", "hidden_states"),
        SplitInput("double_blocks.*", "image_rotary_emb.0", dim=0),  # item 1 is the text's
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("double_blocks.*.attn", text="last"),),
    blocks=(Blocks("double_blocks", ("hidden_states", "encoder_hidden_states")),),
    mlps=("double_blocks.*.img_mlp",),
)

# Here the images of a sample have sizes of their own: sequences are padded behind the images, before the text.
JOYIMAGE_EDIT_PLUS = replace(
    JOYIMAGE_EDIT,
    models=("JoyImageEditPlusTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_hidden_states_mask shape_list return_dict"
    ),
    split_inputs=(
        SplitInput("double_blocks.0", "hidden_states"),
        SplitInput("double_blocks.*", "image_rotary_emb"),  # of the images alone
    ),
)
