"""A target and its draft, found by name and checked on the disk. Knows no memory, and reads no weights."""
