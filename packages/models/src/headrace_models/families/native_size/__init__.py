"""Decoders of text with towers that see images at their own size."""
