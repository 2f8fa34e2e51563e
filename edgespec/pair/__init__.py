"""A target and its draft, found by name and checked on the disk. It knows no memory, and reads no weights."""
