"""Contracts of headrace: what every package knows, and nothing that a user would call a feature.

Importing this package, and any module of it, imports no torch.
"""

__version__ = "0.1.0"
