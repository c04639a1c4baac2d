"""The command line. Each command is a module that parses, calls and prints; it decides nothing."""
