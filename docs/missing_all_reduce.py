"""A bug of sequence parallelism, for the pictures.

Each tp rank has the gradients of norms and biases for its part of the sequence. Here they are not
summed over the ranks.
"""

from megazoo.engine import gradients

gradients.sum_over_copies = lambda *_: None
