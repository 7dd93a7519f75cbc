"""Programs: what is run, kept, dropped and made again, and what that takes."""
