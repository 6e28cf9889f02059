"""Checks what works on this machine, before time is spent on measuring."""
