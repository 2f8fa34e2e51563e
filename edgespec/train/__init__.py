"""Training of what drafts: feature heads, their routers, the small models of growth. Knows no tuning.

Acceptance is measured where a text went through: p and q are known there, and noise is drawn afresh several times, so
that each place says much (`candidates.py`). The same p and q give the rates by rank that Sequoia's programme needs.
C2T's classifier and the decision models learn from exact chances of all nodes (`records.py`). `fit.py` fits them all.

A head is trained from the target's features on disk (`features.py`: groups of texts share a pass over the weights). The
multi-step forward runs in a transformers cache, with masks that show each step what drafting would (`head_steps.py`).
Runs continue from their last checkpoint.
"""
