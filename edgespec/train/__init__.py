"""Training: records of what verification accepts, and the small models that are fitted on them."""
