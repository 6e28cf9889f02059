"""Values that need no torch: cases and grids, names, metrics, registries, settings, files."""
