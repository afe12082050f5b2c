"""The name under which an item of media brings its vectors, for those who read, schedule and run it."""

VECTORS = "media_embeds"
"""Input of an item that comes as vectors [num_vectors, W], in the activations' dtype: no tower makes them."""
