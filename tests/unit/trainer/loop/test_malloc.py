"""Memory that is freed is kept on a CPU whose allocator is glibc's, and as nobody has set it."""

import platform

import pytest
import torch

from tokenfeed.trainer.config.memory import SET_BY_USER, keep_freed_memory


@pytest.mark.parametrize(
    ("device", "libc", "set_by_user"),
    [("cuda", "glibc", ""), ("cpu", "", ""), ("cpu", "glibc", "LD_PRELOAD")],
)
def test_elsewhere_and_where_the_user_has_set_it_nothing_is_touched(
    device: str, libc: str, set_by_user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    if set_by_user:
        monkeypatch.setenv(set_by_user, "x")
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.delattr("ctypes.CDLL")
    keep_freed_memory(torch.device(device))
