"""Routes, one module per family; each is a plug-in of ``headrace.routers``."""
