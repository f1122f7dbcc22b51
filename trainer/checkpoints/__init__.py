"""Checkpoints: whole or absent, without pickle, written beside the loop.

`checkpoints/step-00000100/` holds what the next step depends on:

    state.safetensors          tensors of rank 0: weights, moments, random states, skips
    checkpoint.json            all else, where each tensor is, and the checksums of both files

Both are written and synced under a temporary folder name, and one rename makes them a checkpoint.
What a killed save left under such a name counts for nothing, and the next save deletes it.

The loop pays for a copy to host memory (`host_copy`); a thread does the rest (`saver`). The
latest checkpoint.json also says which step was best on the validation split, and by what.
"""
