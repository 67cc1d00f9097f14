"""Attention of a few rows over a cache, with each key and value read once for all rows and heads that share it."""
