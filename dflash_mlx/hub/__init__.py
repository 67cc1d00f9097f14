"""Where models come from: known pairs, downloads, GGUF files, checks of checkpoint folders."""
