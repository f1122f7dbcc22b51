"""Texts into ids: tokenizers, the engines that run them, and what each task makes of a record."""
