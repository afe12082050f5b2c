"""Attention and its variants that several families share."""
