"""Packed formats, one module a family. This room knows how a weight is stored, nothing of how it is multiplied.

A format is a `StorageFormat` (`storage.py`): it finds weights by the names of stored tensors and by what config.json
states (`stated.py`). What it finds is a `PackedStorage`, which lays out a weight's parts and unpacks them.
`published.py` describes the formats of others: n matrices of r rows, each in parts of its own, so that a matrix and
experts that are stored one by one or in one tensor are the same. A format says which dimension of a part follows rows;
rows are unpacked a few at a time, in float32, and rounded once. `known.py` lists the formats, and nothing else tells
them apart. docs/extending.md says how to add one.
"""
