"""How many steps a meter leaves out."""

__all__ = ["WARMUP_STEPS", "warmup_steps"]

WARMUP_STEPS = 5


def warmup_steps(steps: int) -> int:
    """How many of a session's steps to leave out: workers start, memory is allocated, kernels are
    compiled. Of a short one half, and always the first, which follows the first evaluation."""
    return max(1, min(WARMUP_STEPS, steps // 2))
