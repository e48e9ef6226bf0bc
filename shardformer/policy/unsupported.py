"""Video transformers of diffusers that no table fits, and why."""

# By class name; diffusers 0.42.
UNSUPPORTED = {
    "SanaWMTransformer3DModel": "its delta rule multiplies a state from frame to frame, which is no sum over tokens",
    "TransformerTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
    "TransformerSpatioTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
}
