"""What models look like on disk: Hugging Face directories, GGUF, Megatron-LM, and shards."""
