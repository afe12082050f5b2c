"""One file a family; each class is an entry point of the group ``headrace.models``."""
