"""Decoders of text that also take audio."""
