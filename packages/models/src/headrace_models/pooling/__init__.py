"""Pooling: what a checkpoint makes of hidden states, and the mathematics of it.

Imported by whoever resolves a checkpoint, so this package itself imports no torch: ``traits``,
``sentence_transformers``, ``labels`` and ``info`` say what a checkpoint comes to; ``sequence``, ``heads`` and
``pooler`` compute it.
"""
