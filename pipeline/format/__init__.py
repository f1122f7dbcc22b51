"""The format of a data set on disk: writing, reading and verifying it."""
