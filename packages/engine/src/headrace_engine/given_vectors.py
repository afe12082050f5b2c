"""Names of inputs of media items that concern their vectors, for those who read, schedule and run them."""

VECTORS = "media_embeds"
"""Input of an item that comes as vectors [num_vectors, W], in the activations' dtype: no tower makes them."""
RETAINED = "num_retained_tokens"
"""Input of an item of which a model keeps some vectors: each has numbers behind it that say which."""
INDEX_WIDTH = 3
"""Numbers behind such a vector."""
