"""How tokens are drawn: what logits stand for, draws from it, and the noise that draws share. It knows no model."""
