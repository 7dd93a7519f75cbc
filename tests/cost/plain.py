"""What tests of costs share that needs no torch."""

from lowtide.cost.device import Environment


def environment(**settings):
    return Environment("a device", "cpu", {"torch": "2"}, settings)
