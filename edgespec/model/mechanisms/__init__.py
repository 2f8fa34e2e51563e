"""What layers keep of a text between passes, one way a file. It knows configurations and rows, no engine and no plan.

Each has a record (`mechanism.py`), which finds it in a configuration, installs it in a decoder and gives that back,
says what a plan counts, and narrows a configuration for the self-check. `known.py` lists the records; whoever plans,
loads or checks asks these, and no other file names a family's code. What is kept of a text are states by name, which
the text commits, cuts, copies and writes to files (`LayerState` in `../text_cache.py`).

Keys and values lie in memory that grows (`keys_values.py`). Beside a card, those of layers that stream may wait in RAM,
and come text by text while rows pass their layer (`waiting_keys.py`). `windows.py` has the facts that a layer's call
does not state: how far its rows see, and whose keys they read. A layer that chooses its keys by an index of its own
does so for each row among the text and the row's ancestors, a few rows at once (`indexed.py`). Where it chooses blocks
of places, they go by position in the row's own path (`row_paths.py`, `block_index.py`): blocks before the tree are the
same for all rows, and their keys are made once. Attention gathers what a row chose (`chosen_keys.py`). Few rows read
latents as they are kept, with an index or without (`latents.py`). Keys into which several rows were compressed are
those of a row's own path (`compressed_keys.py`). Tables of n-grams and the convolutions behind them follow paths as
recurrent layers do (`ngrams.py`).

A recurrent layer keeps a state, which cannot forget a row. Records replace the functions that carry states in
transformers' mixers (`recurrent.py`): convolutions (`short_convolution.py`), and memories that fade
(`fading_memory.py`, `delta_rule.py`, `mamba.py`). The writing of rows stays beside the state (`state_cache.py`) until
some of them become text; those are folded in when the next rows come, so a pass that is cut leaves no trace. Where the
functions of a mixer are unknown, a tree is read level by level (`by_depth.py`). A state cannot be cut to any length: a
turn continues from the whole text, or from the state that was kept at the end of the last long one.
"""
