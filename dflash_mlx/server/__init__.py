"""The HTTP server: protocols of OpenAI and Anthropic in front of the one thread that owns MLX."""
