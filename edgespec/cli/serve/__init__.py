"""`edgespec serve`: from options to a running server, and its end by signals. It knows the server, and no protocol."""
