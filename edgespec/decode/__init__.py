"""The step of all texts: grow, read, accept, commit. It knows token ids, no tokenizer.

`batch.py` has the step. It grows the trees of all texts, reads their rows and those of prompts in one pass over the
target's weights, lets each text accept a path, and commits the path's rows to both caches. `clock.py` times the four
verbs. A draft that has a long text to read has its parts before its tree grows (`draft_reading.py`).
`accept.py` verifies all trees together: verification yields the node whose row it reads next, and the head makes the
rows of all texts in one read, with those of nodes that are likely to be read later.
`sequence.py` holds what lives as long as a text, and `start.py` makes it.

A pass commits nothing before it has ended. An interrupt may end a step at any place: what counts then is the tokens
that each text was given, and the text begins again from these. Where memory runs out, the scheduler repeats the pass
with smaller trees.

Improving-MCSD's target-initialised trees are lossy and have a loop of their own (`target_initialized.py`), over the
same target and growth. No lossless text passes through it, and nothing of it is in the lossless step.
"""
