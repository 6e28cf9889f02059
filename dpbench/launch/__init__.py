"""Starts, watches and ends the processes that are measured."""
