import socket

import pytest


@pytest.fixture
def free_port():
    """A port of this machine that nobody has, as a text."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
