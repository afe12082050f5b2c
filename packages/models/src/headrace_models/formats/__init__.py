"""Checkpoint formats; each is an entry point of the group ``headrace.weight_formats``."""
