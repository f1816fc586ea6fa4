"""Read Megatron-LM checkpoints in the formats torch_dist and torch, without Megatron-LM."""
