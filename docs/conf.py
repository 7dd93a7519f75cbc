"""The site: `make site` builds these pages with Sphinx, from the Markdown that GitHub shows too."""

project = "Lowtide"
html_title = "Lowtide"
extensions = ["myst_parser"]
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["site/index.html"]

# the source is the clone, so that links from page to page are those that GitHub follows
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "benchmarks/results/*.md",
    "examples/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "dist", "node_modules", "src", "tests", "web", "README.md"]

myst_heading_anchors = 4
nitpicky = True
suppress_warnings = ["toc.not_included"]  # results are reached from their own list
