"""Wire protocols: request and answer bodies, and one module per kind of call."""
