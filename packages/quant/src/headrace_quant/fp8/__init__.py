"""8-bit floats: checkpoints of the method ``fp8``, and layers and tensors in FP8 of any format."""
