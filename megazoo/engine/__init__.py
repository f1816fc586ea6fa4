"""Batches, the run of a pipeline schedule, and the training step."""
