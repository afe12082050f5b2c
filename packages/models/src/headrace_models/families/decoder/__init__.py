"""Dense decoders of text: attention and one MLP in each block."""
