"""Packed formats, one module each. Knows how a weight is stored, packed and unpacked; nothing of layers or streams.

`known.py` lists them. A new format is its module, its line in that list and its tests.
"""
