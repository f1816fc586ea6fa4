"""The programs behind the command `megazoo`."""
