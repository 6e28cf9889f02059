"""Processes that are measured: how they are started, watched and ended."""
