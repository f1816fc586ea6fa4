"""Bugs in settings, positions, labels and initial values, published in 2026."""
