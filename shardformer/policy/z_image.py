"""Z-Image (diffusers `ZImageTransformer2DModel`): images refined by themselves, then image and text as one sequence."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput

# Sizes of images and lengths of captions may differ within a batch: sequences are padded at their ends. So the images
# are whole again before each caption is put behind its own image, and the joined sequence is split anew.
Z_IMAGE = Policy(
    models=("ZImageTransformer2DModel",),
    origin=("diffusers",),
    arguments=(
        "x t cap_feats return_dict controlnet_block_samples siglip_feats image_noise_mask patch_size f_patch_size "
        "joint_attention_kwargs"
    ),
    refuses=(
        (
            "controlnet_block_samples",
            "they are of image and text together, and come before it is known how long either is; leave them out",
        ),
    ),
    split_inputs=(
        SplitInput("noise_refiner.0", "x"),
        SplitInput("noise_refiner.*", "freqs_cis"),
        SplitInput("noise_refiner.*", "noise_mask"),
        SplitInput("layers.0", "x"),
        SplitInput("layers.*", "freqs_cis"),
        SplitInput("layers.*", "noise_mask"),
        SplitInput("all_final_layer.*", "noise_mask"),
    ),
    gather_outputs=(GatherOutput("noise_refiner.-1", ends=True), GatherOutput("all_final_layer.*")),
    self_attention=("noise_refiner.*.attention", "layers.*.attention"),
    blocks=(Blocks("noise_refiner", ("x",)), Blocks("layers", ("x",))),
    mlps=("noise_refiner.*.feed_forward", "layers.*.feed_forward"),
)
