"""Fast encoders: UTF-8 texts in, ids out. Other modules import `engine` and `words`, and nothing
else of it; it imports nothing else of `encoding`."""
