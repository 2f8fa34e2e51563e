"""`edgespec serve`: from options to a running server, and its end by signals."""
