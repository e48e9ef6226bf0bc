"""Video transformers that no table fits, and why."""

# By class name; diffusers 0.42.
UNSUPPORTED = {
    "SanaWMTransformer3DModel": "its delta rule multiplies a state from frame to frame, which is no sum over tokens",
    "TransformerTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
    "TransformerSpatioTemporalModel": "a part of a UNet, whose convolutions need the whole frame",
}

# Classes of other packages, by package and name: those have the name of a class that a table fits.
ELSEWHERE = {
    ("videox_fun", "HunyuanVideoTransformer3DModel"): (
        "its attention processor cuts queries and keys by lengths of the whole sequence, which a rank's tokens are "
        "not; diffusers' class reads the same weights"
    ),
}
