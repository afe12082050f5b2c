"""One folder a kind of model, one file a family.

Each class is an entry point of the group ``headrace.models``.
"""
