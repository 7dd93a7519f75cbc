"""Any step as a Graphviz file with boxes and ports, read again, and drawn as SVG."""

from lowtide.formats.dot.read import read_dot as read
from lowtide.formats.dot.svg import FORMAT, SVG_FORMAT
from lowtide.formats.dot.write import write_dot as write

__all__ = ["FORMAT", "SVG_FORMAT", "read", "write"]
