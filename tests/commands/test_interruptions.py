"""A loop that is interrupted, forked or left to a thread: each goes on exactly, or ends quietly."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.delivery import PREAMBLE, open_loader, pool_of, spans
from support.processes import is_alive, run_script, workers_of

from tokenfeed.pipeline.errors import LoaderError

pytestmark = [pytest.mark.clock, pytest.mark.usefixtures("forked_workers")]


def in_a_fork(work: Callable[[], object]) -> str:
    """What some work gives in a fork of this process."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sink, repr(work()).encode())
        except BaseException as error:
            os.write(sink, repr(error).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source) as file:
        told = file.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("num_workers", "change"), [(0, None), (1, None), (1, 0)])
def test_a_fork_goes_on_with_workers_of_its_own_and_leaves_the_parents_alone(
    folder: Path, num_workers: int, change: int | None
) -> None:
    whole = [spans(batch) for batch in open_loader(folder, epochs=3)]
    with open_loader(folder, num_workers=num_workers, epochs=3) as loader:
        assert [spans(batch) for batch in islice(loader, 7)] == whole[:7]
        before = workers_of()

        def rest() -> Any:
            if change is not None:
                loader.num_workers = change
            delivered = [spans(batch) for batch in islice(loader, 30)]
            loader.close()
            return delivered

        assert in_a_fork(rest) == repr(whole[7:37])
        assert in_a_fork(loader.close) == "None"
        assert workers_of() == before
        assert all(is_alive(pid) for pid in before)
        assert [spans(batch) for batch in loader] == whole[7:]


INTERRUPT = """
import random
whole = {}
loader = open_loader(num_workers=0, epochs=None)
for batch in loader:
    whole[loader.position] = batch.rows.tolist()
    if loader.position.epoch == 2:
        break
digest = loader.state_dict()

def interrupt_twice(draw=random.Random(0)):
    for _ in range(2):
        time.sleep(draw.random() * 0.02)
        os.kill(os.getpid(), signal.SIGINT)

loader, ends = open_loader(num_workers=2, epochs=None), 0
for trial in range(TRIALS):
    thread = threading.Thread(target=interrupt_twice)
    try:
        try:
            thread.start()
            for batch in loader:
                if loader.position.epoch == 2:
                    break
                assert batch.rows.tolist() == whole[loader.position]
        finally:  # the second may come at any moment here, too
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt:
                    pass
    except KeyboardInterrupt:
        ends += 1
    if loader.position.epoch == 2:
        assert loader.state_dict() == digest
        loader.load_state_dict(open_loader().state_dict())
loader.close()
assert ends
print(json.dumps(children()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("trials", [6, pytest.param(60, marks=pytest.mark.long)])
def test_loop_goes_on_after_any_two_interruptions_in_a_row(folder: Path, trials: int) -> None:
    ended = warm.run(["-c", PREAMBLE + INTERRUPT.replace("TRIALS", str(trials)), folder])
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


DAEMON = """
loader = open_loader(num_workers=1, epochs=None)
begun = threading.Event()

def read():
    for batch in loader:
        if not begun.is_set():
            [worker] = children()
            os.kill(worker, signal.SIGSTOP)  # the thread waits for it soon, and for ever
            begun.set()

threading.Thread(target=read, daemon=True).start()
begun.wait()
pool = loader._delivery._feed._pool
while any(pending.answer for pending in pool._pending):
    time.sleep(0.01)
"""


def test_a_daemon_thread_that_reads_ends_quietly_with_the_interpreter(folder: Path) -> None:
    assert run_script(PREAMBLE + DAEMON, folder) is None


ENDING_BETWEEN_BATCHES = """
import atexit, time
atexit.register(time.sleep, 1)  # the last to run: the loader is closed by then, the thread runs on
{preamble}
loader = open_loader(num_workers={num_workers}, epochs=None)
begun = threading.Event()

def read():
    for batch in loader:
        begun.set()
        time.sleep(0.01)

threading.Thread(target=read, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_daemon_thread_between_two_batches_ends_quietly_with_the_interpreter(
    folder: Path, num_workers: int
) -> None:
    script = ENDING_BETWEEN_BATCHES.format(preamble=PREAMBLE, num_workers=num_workers)
    assert run_script(script, folder) is None


def test_a_loader_that_another_thread_closes_is_an_error_in_one_line(folder: Path) -> None:
    with open_loader(folder, num_workers=1, epochs=None) as loader:
        next(iter(loader))
        pool_of(loader).close()
        with pytest.raises(LoaderError, match="another thread closed the loader"):
            list(loader)
