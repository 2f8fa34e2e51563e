"""The step and its loop: propose, look, accept, commit. Knows token ids, no tokenizer."""
