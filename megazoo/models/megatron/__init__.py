"""Megatron-LM's checkpoints, read without Megatron-LM: of the formats torch_dist and torch."""
