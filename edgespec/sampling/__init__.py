"""How tokens are drawn: the distribution of logits, draws from it, the noise that draws share. It knows no model."""
