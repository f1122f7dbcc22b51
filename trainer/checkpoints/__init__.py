"""Checkpoints: complete or absent, without pickle, written while training continues.

`checkpoints/step-00000100/` holds everything that the next step depends on:

    state-0.safetensors        tensors: weights, optimizer moments, skipped steps
    checkpoint.json            everything else, and all checksums

With --compress-checkpoints, the first file is state-0.safetensors.zst.

If weights are sharded, rank 1 writes its shards to state-1.safetensors, and so on.

All files are written and synced in a folder with a temporary name. One rename makes the folder a
checkpoint. A killed save leaves a temporary folder, which is ignored; the next save deletes it.

The loop does not wait for a save. The device copies tensors to host memory while it computes
(`HostCopy`), and a thread writes the files. checkpoint.json also names the best step on the
validation split, and its metric.
"""
