"""Draws runs as one HTML page that opens offline. It needs the extra ``report``."""
