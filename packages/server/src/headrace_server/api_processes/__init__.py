"""Several HTTP processes of one server."""
