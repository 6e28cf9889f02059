"""What to use: which cases fit into memory, and what another trainer would save."""
