"""Encoders of recordings, and what makes vectors of their states."""
