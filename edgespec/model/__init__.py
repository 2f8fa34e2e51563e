"""One transformers model with a cache that trees can be taken back from. Knows no draft, no policy, no text."""
