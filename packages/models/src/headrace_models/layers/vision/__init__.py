"""Towers for images, and their parts."""
