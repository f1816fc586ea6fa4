"""Code for CPU ranks on one host."""
