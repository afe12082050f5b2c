"""Engines that share the experts of a model, and so run their passes together."""
