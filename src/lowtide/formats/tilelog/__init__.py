"""Logs of a training step run in spatial tiles: the document, its records and tensors, what they prove."""

from lowtide.formats.tilelog.document import FORMAT, facts, format_info, log_of, read, recognise, tiles, write

__all__ = ["FORMAT", "facts", "format_info", "log_of", "read", "recognise", "tiles", "write"]
