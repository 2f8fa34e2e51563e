"""Packed formats, one module a family. This room knows how a weight is stored and packed, nothing of layers or streams.

A format is one object (`packed_format.py` has its interface). It finds its weights by the names of stored tensors and
by what config.json states (`stated.py`), lays out their parts, unpacks them, and packs weights where we can.
`published.py` describes the formats of others: n matrices of r rows, each in parts of its own, so that a matrix and
experts that are stored one by one or in one tensor are the same. A format says which dimension of a part follows rows;
rows are unpacked a few at a time, in float32, and rounded once. `known.py` lists the formats, and nothing else tells
them apart. docs/extending.md says how to add one.
"""
