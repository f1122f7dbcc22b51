"""Models: what turns a micro-batch into logits. Built in, of `transformers`, or anybody's."""
