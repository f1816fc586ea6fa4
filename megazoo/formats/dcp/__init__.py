"""Read checkpoints of torch.distributed.checkpoint (DCP) without its classes, and write them."""
