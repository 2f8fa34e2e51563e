"""One transformers model with a cache that trees can be taken back from. It knows no draft, no policy, no text.

transformers computes the forward; this room supplies caches, positions (committed length plus depth) and attention.
Each text has a cache of its own (`text_cache.py`), which grows in steps. `attention.py` is registered with
transformers as an attention function: it sees windows, soft caps and sinks as keywords, and attends text by text;
`pass_rows.py` says which keys a row sees. A long context is attended to without a mask and the tree's own keys with
one, and `partial_attention.py` joins both parts. `layer_attention.py` reads from the configuration what a layer's call
does not say. Families that bypass the registry pass each layer text by text while its weights are there.

Rows pass each layer in chunks of 512 (`layer_major.py`): one pass over the weights for a prompt of any length, or for
all trees. The draft can read one text in shapes that repeat, so that CUDA records a pass once (`cuda_graphs.py`).

A recurrent layer keeps a state, which cannot forget a row. `recurrent.py` replaces the functions that carry states in
transformers' mixers. What rows write lies beside the state (`state_cache.py`) until it is known which of them are
text; those are folded in when the next rows come, so a pass that is cut leaves no trace. Where the functions of a
mixer are not known, a tree is read level by level (`recurrent_levels.py`). A state cannot be cut to any length: a turn
goes on from the whole text, or from the place that was kept at the end of the last long one.

`supported.py` refuses a family from its configuration, with the reason; `self_check.py` tries the rest on a narrow
random copy, paths against trees.
"""
