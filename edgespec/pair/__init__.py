"""A target and its draft, found by name and checked on the disk. It knows no memory, and reads no weights.

`find.py` takes a folder, or a name that `hub/` knows; `at_hand.py` finds drafts that nobody named, and `choices.py` has
those among which one is to be chosen. `same_tokens.py` compares tokenizers: a draft may lack some added tokens, and
never proposes them. `config_bounds.py` refuses what no model has. `fingerprint.py` tells models apart wherever they
lie: it digests all bytes of a small checkpoint, and of a large one all small tensors and four pieces of each other. The
digest is kept with the files' sizes, times and inodes, and made again where one of these differs.
"""
