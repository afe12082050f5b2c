"""Groups of ranks and how they talk; entry points of the group ``headrace.communicators``."""
