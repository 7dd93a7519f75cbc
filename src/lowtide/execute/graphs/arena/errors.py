"""Why something cannot be captured."""

__all__ = ["CannotCaptureError"]


class CannotCaptureError(Exception):
    """Why a part cannot be replayed as a graph, in words."""
