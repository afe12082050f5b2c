"""What runs inside the engines' own environments, apart from the rest.

The folder of a program comes first on Python's path: beside ``kernels.py`` or ``timing.py`` an engine that
imports a distribution of that name would get ours.
"""
