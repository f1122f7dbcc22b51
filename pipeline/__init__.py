"""The library that other projects import: shard format, plans and loader.

Its public names are had from `tokenfeed` itself. Imports nothing by itself, so that what needs no
torch can be read without it.
"""
