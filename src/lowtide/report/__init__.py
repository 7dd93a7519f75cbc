"""Views of a step, made once and rendered as text, JSON or a table."""
