"""An engine learns from its own steps what passes cost and trees yield, and grows the trees that pay. It knows
no text and no loop: decode hands it the seconds and the paths of each step.
"""
