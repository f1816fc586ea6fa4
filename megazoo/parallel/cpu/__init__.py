"""What only CPU ranks of one host need."""
