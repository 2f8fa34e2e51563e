"""From logits to tokens: penalties, grammars, distributions, draws, and the noise of target and draft. It knows no model."""
