"""`edgespec generate`: rows become requests, and those records. Knows no other command."""
