"""The output for users: progress, results, tables, sizes and ages."""
