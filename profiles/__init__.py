"""Hardware profiles: facts about a machine, and timings of callables that are given to it. It knows no model code."""
