"""Hardware profiles: facts about a machine, and timings of callables that are given to it.

This room knows no model code and imports neither of the others.
"""
