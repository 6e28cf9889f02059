"""Checks of ``dpbench doctor``: what works on this machine."""
