"""Quantization methods, one file each; entry points of the group ``headrace.quantization``."""
