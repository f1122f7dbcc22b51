"""The loader in other frameworks: what their loops need beside batches, one small file each.

    steps         any loop: the micro-batches of an optimizer step, and what to divide a loss by
    packed        any loop: check that a model keeps the documents of a packed row apart
    transformers  `transformers.Trainer`
    lightning     Lightning
    accelerate    Accelerate
    stall         the stall of loops that are not ours, for the callbacks of both
    dataloader    code that insists on a torch DataLoader, or saves a stateful one

Each imports the framework of its name, so import the one you use. Above `tokenfeed.pipeline`, and
used by nothing else in the package.
"""
