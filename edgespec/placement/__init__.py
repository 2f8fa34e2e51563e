"""The memory of a pair's weights is counted, planned and filled here. It knows nothing of profiles and texts."""
