"""Ranks: processes over which one model is spread."""
