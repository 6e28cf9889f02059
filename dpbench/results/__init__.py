"""Results of measurements: rows, ratios, comparisons and saved runs. No module imports torch."""
