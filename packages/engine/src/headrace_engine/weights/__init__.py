"""Weights that change while an engine runs."""
