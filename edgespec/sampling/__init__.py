"""From logits to tokens: penalties, grammars, distributions, draws, the noise that is shared. It knows no model."""
