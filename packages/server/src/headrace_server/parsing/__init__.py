"""Parsing of answers: the chosen parsers, the scanner of the text, plug-in files."""
