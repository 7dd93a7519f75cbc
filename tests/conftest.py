import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

DOCUMENTS = Path(__file__).parent.parent / "examples" / "documents"


def document_path(number: str) -> Path:
    return next(DOCUMENTS.glob(f"{number}_*.txt"))


@pytest.fixture(scope="session")
def documents() -> dict[str, bytes]:
    """The five documents by their number, `000` to `004`."""
    return {path.name[:3]: path.read_bytes() for path in sorted(DOCUMENTS.glob("00*_*.txt"))}
