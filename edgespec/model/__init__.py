"""One transformers model with a cache from which trees can be removed. It knows no draft, no policy, no text.

transformers computes the forward; this room supplies caches, positions (committed length plus depth) and attention.
Each text has a cache of its own (`text_cache.py`), which grows in steps. `attention.py` is registered with
transformers as an attention function: it gets windows, soft caps and sinks as keywords, and attends text by text;
`pass_rows.py` determines the keys that a row sees. Attention to a long context needs no mask, attention to the tree's
own keys does; both parts are joined. `layer_attention.py` reads from the configuration the facts that a layer's call
does not state. In families that bypass the registry, each text passes a layer by itself.

Rows pass each layer in chunks of 512 (`layer_major.py`): one pass over the weights for a prompt of any length, or for
all trees. The draft can read one text in shapes that repeat, so that CUDA records a pass once (`cuda_graphs.py`).

A layer that chooses its keys by an index of its own does so for each row among the text and the row's ancestors: the
index's keys stay with the text (`text_cache.py`), and scores exist for a few rows at once. Where it chooses blocks of
places, they go by position in the row's own path (`row_paths.py`, `block_index.py`): blocks before the tree are the
same for all rows, and their keys are made once (`block_keys.py`). Attention gathers what a row chose
(`chosen_keys.py`). Few rows read latents as they are kept, with an index or without (`latent_attention.py`). Keys into
which several rows were compressed are those of a row's own path (`compressed_keys.py`). Tables of n-grams and the
convolutions behind them follow paths as recurrent layers do (`ngrams.py`).

A recurrent layer keeps a state, which cannot forget a row. `recurrent.py` replaces the functions that carry states in
transformers' mixers. The writing of rows stays beside the state (`state_cache.py`) until some of them become text;
those are folded in when the next rows come, so a pass that is cut leaves no trace. Where the functions of a mixer are
unknown, a tree is read level by level (`recurrent_levels.py`). A state cannot be cut to any length: a turn continues
from the whole text, or from the state that was kept at the end of the last long one.

A family whose cache follows no tree is read by `plain_model.py`: transformers' own forward, masks and cache, a token
a pass, or a chain where a trial shows that the cache can be cut back to what is kept of it. The forwards of several
texts take turns, layer by layer (`layer_rounds.py`).

`supported.py` refuses what is no decoder, with the reason, and knows
families that follow no trees; `decoding_level.py` tries the rest on a narrow random copy.
"""
