"""Sampling: from logits to tokens and log-probabilities."""

from headrace_engine.sampling.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput"]
