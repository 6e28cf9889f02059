"""Results: rows, ratios, storage and summaries. Never imports torch."""
