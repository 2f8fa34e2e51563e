"""Where the weights of a pair live: memory is counted, planned and filled. It knows nothing of profiles and texts."""
