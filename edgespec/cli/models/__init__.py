"""`edgespec models`: the models on this machine, and which drafts for which. Knows no engine."""
