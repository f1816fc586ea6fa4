"""The programs that the command `megazoo` runs."""
