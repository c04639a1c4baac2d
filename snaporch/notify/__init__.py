"""Telling people how the runs of policies ended: by a program, by e-mail, by apprise."""
