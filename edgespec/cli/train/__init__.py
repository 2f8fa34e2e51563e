"""`edgespec train`: heads, routers and the small models of growth. Knows no other command."""
