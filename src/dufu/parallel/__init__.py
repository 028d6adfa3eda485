"""Layouts: which process holds what, and what passes between them."""
