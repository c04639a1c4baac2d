"""The rules of ``snaporch check``."""
