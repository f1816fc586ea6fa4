"""Ranks of a program: start them, stop them on signals, and report ranks that died or do not
respond."""
