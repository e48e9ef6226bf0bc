"""Cosmos 3 (diffusers `Cosmos3OmniTransformer`): text for itself; video, sound and actions look at it."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput

COSMOS3 = Policy(
    models=("Cosmos3OmniTransformer",),
    origin=("diffusers",),
    arguments=(
        "input_ids text_indexes position_ids und_len sequence_length vision_tokens vision_token_shapes "
        "vision_sequence_indexes vision_mse_loss_indexes vision_timesteps vision_noisy_frame_indexes "
        "sound_tokens sound_token_shapes sound_sequence_indexes sound_mse_loss_indexes sound_timesteps "
        "sound_noisy_frame_indexes action_tokens action_token_shapes action_sequence_indexes "
        "action_mse_loss_indexes action_timesteps action_noisy_frame_indexes action_domain_ids "
        "return_dict"
    ),
    split_inputs=(
        # There is no batch: dim 0 holds the tokens.
        SplitInput("layers.0", "gen_seq", dim=0),
        # Cosines and sines of the text, then of what is generated: the latter two follow the tokens.
        SplitInput("layers.*", "rotary_emb.2", dim=0),
        SplitInput("layers.*", "rotary_emb.3", dim=0),
    ),
    gather_outputs=(GatherOutput("norm_moe_gen", dim=0),),
    joint_attention=(JointAttention("layers.*.self_attn", text="first", text_alone=True),),
    blocks=(Blocks("layers", ("gen_seq",)),),
    mlps=("layers.*.mlp_moe_gen",),
)
