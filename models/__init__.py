"""Known pairs, one TOML file each, and the weights of the drafters that are shipped."""
