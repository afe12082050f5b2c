"""Mixtures of experts: routers, experts, and both together."""
