"""Hardware profiles: facts about a machine, timings of callables that are given to it. Knows no model code."""
