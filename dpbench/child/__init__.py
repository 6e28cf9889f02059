"""What runs in the process that is measured, and what it and its parent tell each other."""
