"""Images: decoding, and what models' processors make of them."""
