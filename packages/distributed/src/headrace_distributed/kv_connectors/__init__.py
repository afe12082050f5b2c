"""Stores of blocks of the KV cache outside an engine's pools."""
