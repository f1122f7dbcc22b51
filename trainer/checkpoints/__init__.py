"""Checkpoints: complete or absent, without pickle, written while training continues.

`checkpoints/step-00000100/` holds everything that the next step depends on:

    state.safetensors          tensors of rank 0: weights, optimizer moments, random states, skips
    checkpoint.json            everything else, the place of each tensor, and both checksums

Both files are written and synced in a folder with a temporary name. One rename makes the folder a
checkpoint. A killed save leaves a temporary folder, which is ignored; the next save deletes it.

The loop waits only for a copy to host memory (`tensor_file.HostCopy`). A thread writes the files
(`async_saver`). checkpoint.json also names the best step on the validation split, and its metric.
"""
