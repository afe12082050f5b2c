"""A speech model for headrace, as a package of its own."""
