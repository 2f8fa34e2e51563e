"""Where the weights of a pair live: memory counted, planned and filled. Knows nothing of profiles and texts."""
