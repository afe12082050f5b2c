"""Suites of model families: equality with Hugging Face transformers on tiny models."""
