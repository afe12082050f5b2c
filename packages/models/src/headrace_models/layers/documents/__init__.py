"""Towers for pictures of documents."""
