"""Lowtide: train the model you have in the memory you have."""
