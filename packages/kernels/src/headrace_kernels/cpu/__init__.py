"""Native CPU kernels: ``library`` loads the shared library, ``ops`` calls it, ``provider`` offers it."""
