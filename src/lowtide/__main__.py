"""``python -m lowtide``."""

from lowtide.commands.main import main

main()
