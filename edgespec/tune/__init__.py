"""Measuring a loaded pair: what its trees yield and what its steps cost, for `profiles` to choose from."""
