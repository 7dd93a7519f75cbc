"""Show the five example documents: what each is, and where its memory and time go.

python examples/show_documents.py

Also writes a trace to open in Perfetto and a picture of the data-flow graph, under .demo/.
"""

from __future__ import annotations

from pathlib import Path

from lowtide.commands.main import cli

ROOT = Path(__file__).parent.parent
OUT = ROOT / ".demo"


def run(*arguments: str) -> None:
    """Run one command line, shown before its output."""
    print(f"\n$ lowtide {' '.join(arguments)}", flush=True)
    cli.main(list(arguments), prog_name="lowtide", standalone_mode=False)


def main() -> None:
    """Show every document, then write the two files."""
    OUT.mkdir(exist_ok=True)
    documents = [
        str(p.relative_to(Path.cwd())) if p.is_relative_to(Path.cwd()) else str(p) for p in _documents()
    ]
    for document in documents:
        run("show", document)
    run("top", documents[1], "--by", "type", "--limit", "5")
    run("convert", documents[1], "--to", "trace", "-o", str(OUT / "profile.trace.json"))
    run("convert", documents[2], "--to", "svg", "-o", str(OUT / "dataflow.svg"))
    print(f"\nOpen {OUT / 'dataflow.svg'} in a browser and {OUT / 'profile.trace.json'} in Perfetto.")


def _documents() -> list[Path]:
    return sorted((ROOT / "examples" / "documents").glob("00*_*.txt"))


if __name__ == "__main__":
    main()
