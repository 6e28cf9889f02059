"""Private training in the loops of other packages."""
