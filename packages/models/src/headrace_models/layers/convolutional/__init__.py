"""Towers that are convolutions for the most part."""
