"""Programs run on PyTorch, watched and compared."""
