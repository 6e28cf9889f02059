"""The commands of ``dpbench``, one module each: its help, its arguments, what it does."""
