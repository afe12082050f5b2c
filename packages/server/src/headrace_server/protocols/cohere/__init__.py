"""Cohere's protocol of embeddings."""
