"""A few rows times a quantized matrix, with each weight read once for all rows (Metal)."""
