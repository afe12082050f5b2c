"""Tool-call parsing: shared machinery here, each format in a module of :mod:`formats`."""
