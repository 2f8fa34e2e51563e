"""The memory of a pair's weights is read once, planned and filled here. It knows no text and no step.

`pair_setup.py` takes a workload (texts that wait, their mean tokens, how many may share a pass) and gives a
`PairSetup`: trees, number of texts, placement. It reads free memory once and builds each model's skeleton once; plans
of other trees and numbers of texts share both. `pair_profile.py` finds the profile of the pair whose trees leave the
layers where they were when it was measured.

`memory.py` counts everything that is not a weight: keys and values, a pass's rows, logits, the draft's distributions,
and states of recurrent layers (`states.py`). `place.py` puts it together with the weights by `offload/placement.py`.
`parallel.py` weighs a text's cache against a layer that stays resident. `largest_tree.py` finds the largest trees that
move no layer. Runs, estimates and tuning share all of it, so a run loads the very placement that was printed.
"""
