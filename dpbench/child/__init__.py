"""Code of the measured process, and its messages to and from its parent."""
