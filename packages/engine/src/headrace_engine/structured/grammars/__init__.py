"""Regexes and grammars of other programs: read into one tree, written for each library."""
