"""How tokens are drawn: the distribution that logits stand for, draws from it, and the noise that draws share. It knows no model."""
