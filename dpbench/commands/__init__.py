"""The commands of ``dpbench``. Each is a module with its help, its arguments and its code."""
