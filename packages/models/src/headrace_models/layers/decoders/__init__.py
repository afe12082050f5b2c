"""Whole decoders that families of one shape inherit: they say how a stack is put together."""
