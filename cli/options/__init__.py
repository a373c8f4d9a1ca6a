"""Groups of options: each option is declared once, and commands take whole groups."""
