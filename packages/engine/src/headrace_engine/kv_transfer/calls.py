"""Methods by which rank 0 has the other ranks move and find their parts of blocks."""

LOAD, SAVE = "load_blocks", "save_blocks"
"""Between two passes."""
FIND, FORGET = "find_blocks", "forget_blocks"
"""Beside the passes, in one thread."""
