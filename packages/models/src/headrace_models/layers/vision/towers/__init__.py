"""Towers: from patches of an image to its states."""
