"""Command lines of other programs, as settings of memfit."""
