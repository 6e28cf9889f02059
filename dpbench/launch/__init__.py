"""Starts, watches and ends measured processes."""
