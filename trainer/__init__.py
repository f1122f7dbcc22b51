"""The lean loop: trains a model from a `ShardLoader` and reports the stall that is left.

Uses `tokenfeed.pipeline`, and is used by `tokenfeed.tools`. Imports nothing by itself, so that a
module that needs no torch can be read without it.
"""
