"""How much memory a language model takes: every part is imported from its own module."""
