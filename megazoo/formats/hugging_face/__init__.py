"""Read and write Hugging Face model directories: names of tensors, config.json, weights."""
