"""Several processes that train one model: who they are, what they add up, what they agree on.

The loop speaks to a `World`. That of one process does nothing, so the loop has no cases.
"""
