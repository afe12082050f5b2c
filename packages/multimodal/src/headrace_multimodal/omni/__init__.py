"""Processors of models that take images, videos and audio in one prompt."""
