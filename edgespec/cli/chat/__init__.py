"""`edgespec chat`: a conversation in a terminal, or one turn in a pipe."""
