"""Packed formats, one module each. This room knows how a weight is stored and packed, nothing of layers or streams.

`known.py` lists the formats. A new format needs its module, its line in that list and its tests.
"""
