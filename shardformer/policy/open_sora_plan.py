"""Open-Sora-Plan v1.3 in its authors' own repository (`OpenSoraT2V_v1_3`), whose tokens come first: [S, B, C]."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, Positions, SplitInput

OPEN_SORA_PLAN = Policy(
    models=("OpenSoraT2V_v1_3",),
    arguments="hidden_states timestep encoder_hidden_states attention_mask encoder_attention_mask return_dict",
    unfit=(
        (
            "sparse1d",
            "its sparse blocks cut the clip into every n-th token, which a rank's own tokens are not; train it with "
            "sparse1d=False",
        ),
    ),
    split_inputs=(SplitInput("transformer_blocks.0", "hidden_states", dim=0),),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    positions=(Positions("RoPE3D.forward", tokens=("tokens",), dim=0),),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
