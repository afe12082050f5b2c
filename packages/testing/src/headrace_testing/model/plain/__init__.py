"""Plain readings of published code, for models that transformers has no class for."""
