"""How the two committed checkpoints were made: tokenizer, corpus, model and loop."""
