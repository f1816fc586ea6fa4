"""Start ranks on this machine with torch.multiprocessing, watch them, and pass signals on."""
