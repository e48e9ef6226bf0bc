"""Step-Video in its authors' own repository (`StepVideoModel`), with `attention_type="torch"`."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, Positions, SplitInput

STEP_VIDEO = Policy(
    models=("StepVideoModel",),
    arguments=(
        "hidden_states encoder_hidden_states encoder_hidden_states_2 timestep added_cond_kwargs encoder_attention_mask "
        "fps return_dict"
    ),
    unfit=(("parallel", 'it splits its tokens by itself then; make it with attention_type="torch"'),),
    split_inputs=(
        SplitInput("transformer_blocks.0", "q"),
        SplitInput("transformer_blocks.*", "attn_mask"),  # of every token and those of its caption
    ),
    gather_outputs=(GatherOutput("transformer_blocks.-1"),),
    self_attention=("transformer_blocks.*.attn1",),
    positions=(Positions("RoPE3D.__call__", tokens=("tokens",)),),
    blocks=(Blocks("transformer_blocks", ("q",)),),
    mlps=("transformer_blocks.*.ff",),
)
