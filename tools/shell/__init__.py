"""The terminal: command lines, messages, progress, signals."""
