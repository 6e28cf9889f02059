"""Checks of ``dpbench doctor`` for what works on this machine."""
