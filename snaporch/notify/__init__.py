"""Notifications about the results of scheduled work: by a program, e-mail or apprise."""
