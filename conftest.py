"""Plug-in of all tests of the repository: a run may ask for samples of long tails."""

pytest_plugins = ["headrace_testing.sampling"]
