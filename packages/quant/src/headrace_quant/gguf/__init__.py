"""GGUF's blocks: linear layers and tables of vectors that stay packed."""
