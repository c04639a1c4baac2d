"""Bundles, safety copies and leftovers that nothing needs any more, and how they go."""
