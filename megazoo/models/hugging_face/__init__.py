"""Hugging Face's directories: the names of tensors, config.json, reading and writing."""
