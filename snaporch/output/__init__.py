"""What users see: progress, tables, sizes and ages in words."""
