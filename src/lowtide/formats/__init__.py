"""Files of other frameworks, and our own: each module reads and writes one format."""
