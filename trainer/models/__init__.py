"""Models, which turn a micro-batch into logits: built-in models, those of `transformers`, and the
user's own."""
