"""`edgespec profile`: a pair measured, and what it came to. Knows no other command."""
