"""Rows, ratios, comparisons and saved runs. No module of this package imports torch."""
