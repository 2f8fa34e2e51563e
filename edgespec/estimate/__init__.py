"""What a pair would do on hardware that need not be here. It knows sizes and data sheets, and loads nothing.

`placement/pass_load.py` counts a pass's bytes, operations and calls of kernels, `profiles/roofline.py` makes seconds of
them, `speed.py` picks the best tree, and `choice.py` the draft that pays most of several. This machine is measured once
(`doctor/machine_speed.py`); for others `profiles/builtin/` holds data sheets with their sources, and the shares of them
that a pass is assumed to reach.
"""
