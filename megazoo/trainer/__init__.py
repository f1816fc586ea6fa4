"""The trainer: a run, its loop, and what it records. The command line is megazoo.cli."""
