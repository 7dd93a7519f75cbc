"""Why something cannot be captured."""

__all__ = ["CannotCaptureError", "NoRoomError"]


class CannotCaptureError(Exception):
    """Why a part cannot be replayed as a graph, in words."""


class NoRoomError(CannotCaptureError):
    """The budget, or the device, has no memory for a part that is replayed."""
