"""Measure the stall of any training script in its own process, without a change to the script.

    watch     hooks of torch that drive a StallMeter: steps, data, evaluation, checkpoints
    patches   replaced names and their restoration, and a finder that patches modules on import
    places    source lines of the user, and the setting that decides how often a line runs
    lines     host code that no hook sees: its lines by samples, their shares by a line timer
    children  child processes of `mp.spawn`
    launch    run a script or a module as `python` does
    summary   the result as text and in report.json
    ranks     readings of other ranks, by files
    termination  a report on SIGTERM, also if the main thread is stuck

Nothing here imports torch before the script does.
"""
