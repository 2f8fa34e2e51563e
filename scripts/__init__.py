"""What measures, checks and makes things, in rooms; none of it is in the wheel.

    bench     how fast something is
    check     whether something holds: equal texts, lawful distributions, files that are torn
    gpu       the parts of `gpu_check.py`, which tries all that needs a card
    make      what ships with the library, or is measured on: models, fits, reference pages
    papers    the papers' tables, and comparisons of their methods
    situations.py    texts, readers and processes that several scripts measure with

A script uses the public API (`edgespec`) where that has what it needs. Further doors to the library's inside:

    edgespec.pair.pair               the built-in pair, and any other, as it is opened
    edgespec.cli.prompts.read        prompts of files
    edgespec.model.causal_model      passes of one model, without an engine
    edgespec.grow.policies           trees of a policy, grown by themselves
    edgespec.train.records           expected tokens and the records of fits
    offload.loaders                  reads of weights, which `situations` slows down
    profiles.measure                 the page cache, the disk's rate and the machine's facts
"""
