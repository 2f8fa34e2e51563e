"""One transformers model with a cache that trees can be taken back from. It knows no draft, no policy, no text."""
