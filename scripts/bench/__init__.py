"""Times parts of edgespec, and whole commands beside other programs."""
