"""Requests on their way in: templates, tokens, checks against the model."""
