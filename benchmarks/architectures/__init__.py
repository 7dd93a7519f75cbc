"""Networks of other people, small and with random weights, to hold Lowtide against eager PyTorch."""
