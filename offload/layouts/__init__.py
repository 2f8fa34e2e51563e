"""Compute layouts, one module a kind. This room knows how devices multiply packed weights, nothing of layers, streams.

A weight is multiplied as it is stored, or is put into a layout of the same numbers: into files, or when it is loaded.
"""
