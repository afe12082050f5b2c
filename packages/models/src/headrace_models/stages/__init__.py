"""Stages: ranges of a decoder's layers, each on ranks of its own."""
