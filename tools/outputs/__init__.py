"""Where a data set is made: a folder or a store, and how files come to be there."""
