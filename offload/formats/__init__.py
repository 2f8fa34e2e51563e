"""Packed formats, one module each: how a weight is stored, packed and unpacked. They know no layers or streams.

`known.py` lists them. A new format needs its module, its line in that list and its tests.
"""
