"""``snaporch status``: the state of guests, policies and the store, problems, and metrics."""
