"""Adapters for using the loader in other frameworks, one file per framework.

    steps         any loop: the micro-batches of an optimizer step, and the divisor of the loss
    packed        any loop: check that a model separates the documents of a packed row
    transformers  `transformers.Trainer`
    lightning     Lightning
    stall         measures the stall of other loops; used by the callbacks for both
    dataloader    code that requires a torch DataLoader or a StatefulDataLoader
    trl           TRL's `SFTTrainer`
    preferences   pairs of conversations, for DPO trainers such as TRL's
    torchtitan    a dataloader for torchtitan's configs

Each module imports its framework, so import only the module that you need. No other part of
tokenfeed imports them.
"""
