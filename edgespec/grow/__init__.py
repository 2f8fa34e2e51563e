"""Tree growth: one module a policy, over the shared best-first engine."""
