"""Runs as one HTML page that opens offline: the same numbers, drawn; needs the extra ``report``."""
