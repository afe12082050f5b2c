"""Processors of models that cut images, and frames of videos, into tiles of a tower's size."""
