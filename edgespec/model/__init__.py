"""One transformers model with a cache from which trees can be removed. It knows no draft, no policy, no text.

transformers computes the forward; this room supplies caches, positions (committed length plus depth) and attention.
Each text has a cache of its own (`text_cache.py`), which grows in steps. `attention.py` is registered with
transformers as an attention function: it gets windows, soft caps and sinks as keywords, and attends text by text;
`pass_rows.py` determines the keys that a row sees. Attention to a long context needs no mask, attention to the tree's
own keys does; both parts are joined. In families that bypass the registry, each text passes a layer by itself.

Rows pass each layer in chunks of 512 (`layer_major.py`): one pass over the weights for a prompt of any length, or for
all trees. The draft can read one text in shapes that repeat, so that CUDA records a pass once (`cuda_graphs.py`).

What layers keep between passes has a room of its own (`mechanisms/`), with a record for each way to keep it.

A family whose cache follows no tree is read by `own_pass_model.py`: transformers' own forward, masks and cache, a token
a pass, or a chain where a trial shows that the cache can be cut back to what is kept of it. The forwards of several
texts take turns, layer by layer (`layer_rounds.py`).

Of a prompt with pictures, a family's own outer forward is recorded up to its decoder (`seeing.py`): rows of
its passes carry what the decoder would get (`seen_rows.py`). A tower is read when a picture comes that is not known
(`sight.py`, `tower_calls.py`), after a trial of the family with a narrow tower (`sight_check.py`).

`supported.py` refuses what is no decoder, with the reason, and knows
families that follow no trees; `tree_support.py` tries the rest on a narrow random copy.
"""
