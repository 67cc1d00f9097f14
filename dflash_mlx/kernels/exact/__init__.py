"""Rows of a target's passes that come out the same, bit for bit, however many are computed at once (`--exact`)."""
