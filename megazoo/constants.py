"""Values that several parts of megazoo share."""

IGNORE_INDEX = -100  # a target or label without loss, as in PyTorch
