"""The test restore: a throw-away clone, looked at for life."""
