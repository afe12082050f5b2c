"""Kernels for headrace: ``xielu`` and ``snake``."""
