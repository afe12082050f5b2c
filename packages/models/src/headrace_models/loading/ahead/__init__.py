"""Weights that are packed before the model is built: which, out of what, and whether they may be used."""
