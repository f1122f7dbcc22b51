"""What workers that encode will import: before a job is known there is time for it."""

__all__ = ["MODULES"]

MODULES = ("tokenfeed.tools.encoding.unit", "awkward", "gigatoken")
