"""An engine learns from its own steps which trees pay, and grows those. It knows no text, no model and no loop.

`decode/` hands it the seconds and the paths of each step (`step.py`).

Trees tune themselves where a text does not depend on its trees and the user gave no size. Three things are learned.
`costs.py`: the seconds of a pass over its rows, medians of few sizes, and of growth by layers and nodes; each times a
speed that the last steps show, so a busy machine is slow at all sizes and one hiccup is nothing. `calibration.py`:
accepted over predicted tokens, by octave of the score. `tokens_by_size.py`: what the best m nodes of the trees so far
would have yielded, which are the tree of size m.

`tree_choice.py` takes the size of most tokens a second of all running texts, among neighbours, and moves the least
score of a node and the least gain of a layer to where tokens pay for the seconds that they add. Probes (`probes.py`)
try what the last steps did not show: a larger tree, a far larger one, plain decoding, and looking again after plain
decoding won. They share one schedule and one budget of time. Where no tree pays, texts decode plainly.

Before the first tree the sums decide: what a small tree took when the draft was loaded, and how far usual trees go
(`draft_facts.py`), against steps without a draft, looked up text included: what that would bring alone is learned from
every step, those with trees too (`lookup_gain.py`). Trees of texts in company must promise more. Such
texts stop looking up what does not pay, and see now and then, without a row, whether it would.

`lookup_choice.py` chooses for each step how many looked up nodes pay, and whether the draft grows beside them, by what
its trees have brought and taken (`draft_worth.py`). There it also leaves out a draft that is held to a size.
How far a draft's guesses went in all of a run is kept for choosing among drafts (`draft_memory.py`).

`edgespec profile` runs this tuner over a user's prompts and keeps its memory as a profile. A run of the same pair on
the same machine starts there; a profile's file holds trees to the size that the tuner ended at. `threads.py` chooses
the processor's threads of each step in the same way.
"""
