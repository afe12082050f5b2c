"""Processors of models each of which prepares images in a way that no other does."""
