"""Results of measurements: rows, ratios, comparisons and saved runs. Never imports torch."""
