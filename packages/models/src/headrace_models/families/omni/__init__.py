"""Decoders of text that take images, videos and audio in one prompt."""
