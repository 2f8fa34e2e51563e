"""DySpec: the chance that a token is accepted is guessed to be its draft probability.

Source: DySpec, section 5 and Algorithms 1 and 2. The conditional probability among what is left,
q(y) / (1 - sum of the siblings drawn before), makes s = V(u) * (1 - that sum) and V = V(u) * q(y).
"""

from torch import Tensor

from edgespec.grow.growing import Layer


def predict_slots(layer: Layer) -> Tensor:
    """Return q of the drawn tokens over the mass left before each draw, [k, c]; slots are selected by s."""
    return layer.q_drawn / layer.mass_left
