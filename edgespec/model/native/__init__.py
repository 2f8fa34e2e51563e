"""Few rows pass all layers of a decoder in one native call. This room knows no draft, no tree, no text.

Between the products of a small model's layers, torch's dispatches and Python take longer than the products. A text that
is compiled for the decoder's shape (`pass_text.py`, with `attention.py`, `delta_rule.py`, `mixture.py` and
`functions.py`) does what a layer does as loops over memory, on torch's threads, and calls the products of
`offload.native` by address. `shape.py` is what a text is written for, `records.py` what it is given; `layers.py` finds
both in a model by its parts, `passes.py` runs it, `states.py` brings what texts keep in layers with a state, and
`trial.py` tries it on a narrow copy.

A row has the same bits alone, in a tree and in company, with any number of threads. Numbers are float32 between a
layer's operations, where transformers rounds to the model's dtype; keys and values are kept in that.
"""
