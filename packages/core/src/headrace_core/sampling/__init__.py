"""Sampling parameters, and the contract of logits processors."""
