"""Generation: the choice of tokens, and the forwards that it takes."""
