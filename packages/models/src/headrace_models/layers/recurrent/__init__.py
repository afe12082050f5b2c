"""Recurrent mixers that several families share: states instead of keys and values."""
