"""Layers that families are built from. Every layer knows its weights' names and shapes, none its file."""
