"""How tokens are drawn: the distribution of logits, draws from it, and the noise that draws share. It knows no model."""
