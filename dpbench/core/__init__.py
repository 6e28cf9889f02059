"""Modules that need no torch: cases, grids, names, metrics, registries, settings, files."""
