"""What came out: rows, ratios, storage and tables. Never imports torch."""
