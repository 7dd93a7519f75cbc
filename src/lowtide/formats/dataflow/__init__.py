"""Data-flow pictures of a distributed step, recovered as text: found, repaired, and joined into a graph."""

from lowtide.formats.dataflow.document import FORMAT, facts, read, read_pieces, recognise

__all__ = ["FORMAT", "facts", "read", "read_pieces", "recognise"]
