"""Encoders of text: they pool, score or label, and generate nothing."""
