"""Decoders of text with mixtures of experts and ordinary attention."""
