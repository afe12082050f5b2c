"""Bodies on the wire: pydantic requests and answers, msgspec chunks of streams."""
