"""Embeddings, classes, scores and ranks: calls that pool."""
