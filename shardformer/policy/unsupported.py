"""Video transformers of diffusers that no table fits, and why."""

# By class name; diffusers 0.42.
UNSUPPORTED = {
    "SanaWMTransformer3DModel": "gated delta-rule attention carries a state from token to token",
    "TransformerTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
    "TransformerSpatioTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
}
