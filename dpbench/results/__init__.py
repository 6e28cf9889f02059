"""Results of measurements: rows, ratios, comparisons and saved runs. It never imports torch."""
