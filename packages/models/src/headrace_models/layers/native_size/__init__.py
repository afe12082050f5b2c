"""Towers that see images at their own size, and their parts."""
