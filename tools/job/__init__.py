"""A run of `pretokenize`: who may write, what is done, who does it, and what is left at the end."""
