"""Conformance suites that implementations of core's plug points inherit, and fakes for tests."""
