"""Training of what drafts: feature heads, their routers, the small models of growth. Knows no tuning."""
