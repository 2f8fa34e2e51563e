"""Growth of token trees from a drafter's distributions. Knows no target: what the target will say comes later."""
