"""Code of the measured process, and the messages between this process and its parent."""
