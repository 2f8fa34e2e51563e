"""Makes what the repository and the other scripts use: the built-in pair, inflated checkpoints, pages of docs."""
