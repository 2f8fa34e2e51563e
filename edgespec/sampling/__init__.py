"""From logits to tokens: penalties, grammars, distributions, draws, the noise that is shared. It knows no model.

The token at position t is argmax(log p + noise). `noise.py` makes the noise with a counter-based generator (Philox
4x64) of the seed, the text's name, the position and the token's id, in float64 on the host, so that every device sees
the same vector.

`processors.py` changes logits by a text's own tokens, in transformers' order: bias and penalties, then forbidden
tokens, then the grammar's mask (`matcher.py`, with llguidance). They apply node by node, with the tokens from the
root to the node, and only to nodes that verification reads. A text without penalties and grammar has none.
Log-probabilities are taken from the same rows before that.
"""
