"""`edgespec estimate`: memory and speed of a pair that is not loaded. Knows no other command."""
