"""A loaded pair measured, and the trees chosen that pay on it. Knows no command line."""
