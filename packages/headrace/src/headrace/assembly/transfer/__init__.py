"""What the engine exchanges with other engines: vectors of media, blocks of the KV cache."""
