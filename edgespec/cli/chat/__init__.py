"""`edgespec chat`: a conversation in a terminal. Knows no other command."""
