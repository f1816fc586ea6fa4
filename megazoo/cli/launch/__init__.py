"""The ranks of a program: how they start, what they do when they are told to stop, and who tells of
one that has died or is silent."""
