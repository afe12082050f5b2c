"""Ranks in processes that this one does not start: on other hosts, or by torchrun or Ray."""
