"""Compute layouts, one module a kind. This room knows how devices multiply packed weights, nothing of layers, streams.

A layout (`layout.py`) multiplies weights as they are stored. A lossless one has an order of its own too, which weights
are put in with all of their numbers: in the files of a cache, or when they are loaded (`at_load.py`). Each tries its
kernel on a sample before it is used. `known.py` lists the layouts; the rest of edgespec asks it. `onednn.py` multiplies
what is not packed. docs/extending.md says how to add one.
"""
