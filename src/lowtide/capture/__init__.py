"""A PyTorch step as a Graph."""
