"""Tools that the server calls itself, on servers that the operator named (``--tool-server``)."""
