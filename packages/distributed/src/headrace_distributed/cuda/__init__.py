"""Communicators of ranks on NVIDIA GPUs: one GPU for each rank."""
