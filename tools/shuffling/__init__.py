"""A global shuffle of a data set: all rows of a split in random order, in bounded memory."""
