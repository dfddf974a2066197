"""Stacks as faulthandler really writes them, in a few words, and ranks with the same one together."""

import faulthandler
import tempfile
import threading
from typing import Any

from ftmon.protocol.analysis.stalls.evidence import Frame, group, parse, training_thread, waits_for_loader_worker, where

SITE = "/env/lib/python3.11/site-packages"

COLLECTIVE = f"""\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1009 in _bootstrap

Thread 0x00007f0000000002 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3800 in all_gather_into_tensor
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{SITE}/ftmon/trainer/probe/hooks/collectives.py", line 84 in call
  File "{SITE}/deepspeed/comm/torch.py", line 120 in all_gather_into_tensor
  File "{SITE}/deepspeed/comm/comm.py", line 117 in log_wrapper
  File "{SITE}/deepspeed/runtime/zero/stage3.py", line 582 in gather
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 60 in <module>
"""

DATA = f"""\
Thread 0x00007f0000000009 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{SITE}/torch/utils/data/dataloader.py", line 1270 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 700 in __next__
  File "{SITE}/ftmon/trainer/probe/hooks/torch.py", line 88 in __next__
  File "/home/me/train.py", line 38 in main
  File "/home/me/train.py", line 60 in <module>
"""


def test_a_wait_in_a_collective_names_it_and_who_asked_for_it():
    thread = training_thread(parse(COLLECTIVE))
    assert thread is not None
    place = where(thread.frames)
    assert (place.doing, place.text) == ("collective", "all_gather_into_tensor in stage3.py:582 in gather")


def test_a_wait_for_a_batch_is_the_dataloaders():
    place = where(parse(DATA)[0].frames)
    assert (place.doing, place.text) == ("data", "next() of the dataloader in train.py:38 in main")


def test_only_the_dataloader_s_wait_for_a_worker_wakes_up_by_itself():
    loader = f"{SITE}/torch/utils/data/dataloader.py"
    in_this_process = [
        Frame("/home/me/train.py", 12, "__getitem__"),
        Frame(f"{SITE}/torch/utils/data/_utils/fetch.py", 52, "fetch"),
        Frame(loader, 789, "_next_data"),
        Frame(loader, 733, "__next__"),
        Frame("/home/me/train.py", 38, "main"),
    ]
    assert where(in_this_process).doing == "data"
    assert not waits_for_loader_worker(in_this_process), "a retry every few seconds is the script's own"
    assert waits_for_loader_worker(parse(DATA)[0].frames)


def test_code_of_the_script_is_its_innermost_line():
    assert where([Frame("/home/me/train.py", 12, "load"), Frame("/home/me/train.py", 60, "<module>")]).text == (
        "train.py:12 in load"
    )
    deep = [Frame(f"{SITE}/requests/api.py", 59, "request"), Frame("/home/me/train.py", 12, "load")]
    assert where(deep).text == "request (api.py:59) in train.py:12 in load"
    assert where([]).text == ""


def test_a_script_that_is_over_and_waits_for_a_thread_is_told():
    place = where([Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")])
    assert (place.doing, place.text) == ("exiting", "the end of the script: waits for a thread or a child")


def test_a_wait_for_an_extension_that_another_process_builds_is_told():
    frames = [
        Frame(f"{SITE}/torch/utils/file_baton.py", 54, "wait"),
        Frame(f"{SITE}/torch/utils/cpp_extension.py", 2012, "_jit_compile"),
        Frame(f"{SITE}/deepspeed/ops/op_builder/builder.py", 560, "jit_load"),
        Frame("/home/me/train.py", 12, "main"),
    ]
    place = where(frames)
    assert place.doing == "waiting"
    assert "lock file that one left behind in train.py:12 in main" in place.text


def test_the_training_thread_is_the_one_that_is_named_else_the_last():
    threads = parse(COLLECTIVE)
    named = training_thread(threads, "0x7f0000000001")
    assert named is not None
    assert named.frames[0].function == "wait"
    assert training_thread(threads, "0x7") == threads[-1]
    assert training_thread([]) is None


def test_ranks_with_the_same_stack_are_one_group_and_the_largest_comes_first():
    groups = group({3: (DATA, ""), **dict.fromkeys((0, 1, 2, 4), (COLLECTIVE, "")), 5: ("", "")})
    assert [one.ranks for one in groups] == [[0, 1, 2, 4], [3], [5]]
    assert groups[1].place.words == "next() of the dataloader"
    assert groups[2].frames == ()


def test_what_faulthandler_writes_here_is_read():
    ready, go = threading.Event(), threading.Event()

    def sleeper() -> None:
        ready.set()
        go.wait(200)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert ready.wait(200)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        go.set()
        thread.join()
        file.seek(0)
        threads: list[Any] = parse(file.read().decode())
    names = {int(one.name, 16): one for one in threads}
    assert any(frame.function == "sleeper" for frame in names[thread.ident or 0].frames)
    main = training_thread(threads, hex(threading.get_ident()))
    assert main is not None
    assert main.frames[0].function == "test_what_faulthandler_writes_here_is_read"
