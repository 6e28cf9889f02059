"""Cases, grids, names, metrics, registries, settings and files. These modules import no torch."""
