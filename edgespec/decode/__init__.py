"""The step and its loop: propose, look, accept, commit. It knows token ids, no tokenizer."""
