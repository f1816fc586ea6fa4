"""Plans of runs: memory, FLOPs, traffic and the bubble of every rank, before anything runs."""
