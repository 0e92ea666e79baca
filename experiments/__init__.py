"""Entry points and their configurations."""
