"""The engine: batches, the run of a pipeline's schedule, and what makes a training step."""
