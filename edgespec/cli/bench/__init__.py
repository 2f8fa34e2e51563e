"""`edgespec bench`: trees against plain decoding. Knows no other command."""
