"""Decoders of text in which some or all layers keep a recurrent state."""
