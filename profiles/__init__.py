"""Hardware profiles: facts about a machine and what was learned on it. It knows no model code.

`measure.py` has the facts of a machine, `files.py` keeps profiles as TOML and finds the one for a machine and a pair,
`schema.py` is their form. `roofline.py` makes seconds of bytes, operations and calls of kernels; `builtin/` has data
sheets of cards with their sources, and in one file the shares of them that a pass is assumed to reach. `experts.py`
expects which experts rows request, and which of these a cache lacks, by one exponent: n rows of a text choose as n^0.75
independent ones. `in_place.py` decides whether an expert moves or is computed where it lies.
"""
