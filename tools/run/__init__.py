"""What every long run needs: whose folder it is, what is done, and workers that do it."""
