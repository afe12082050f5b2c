"""Calls of pooling models that are more than one request: long texts, and pairs to be scored."""
