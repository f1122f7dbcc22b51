"""From texts to ids: tokenizers, the engines that run them, and the encoder of each task."""
