"""A guest made of a snapshot, beside the one it was taken of."""
