"""Tokenizing in several processes, and ranks that wait for the one that does it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from ftmon.trainer.recipe.config.schema import Config, Data, Tokenizer, Training
from ftmon.trainer.recipe.data import pipeline
from ftmon.trainer.recipe.data.encode import Encoder
from ftmon.trainer.recipe.data.records import read_records
from small_tokenizer import family_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_other_ranks_wait_for_rank_0_without_a_limit_and_learn_of_its_end(tmp_path: Path) -> None:
    status = tmp_path / ".prepared"
    first = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with ThreadPoolExecutor(1) as ranks:
        waiting = ranks.submit(pipeline.wait, status, first.pid)
        assert not waiting.done()
        first.communicate()
        assert waiting.result(60).error == "rank 0 ended while it prepared the data"
    pipeline.leave(status, pipeline.Status(folder="there"))
    assert pipeline.wait(status, first.pid).folder == "there"


def chats(path: Path, *answers: Any) -> Path:
    records = [{"prompt": f"hello {number}", "response": answer} for number, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_several_processes_write_what_one_writes(tmp_path: Path, cache: Path) -> None:
    path = chats(tmp_path / "a.jsonl", *["red blue " * count for count in range(1, 40)], None)
    folder = tmp_path / "tokenizer"
    made = family_tokenizer("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    made.save_pretrained(str(folder))

    def config(processes: int) -> Config:
        return Config(
            data=Data(path=str(path), processes=processes, max_refused=0.1),
            training=Training(sequence_length=64),
            tokenizer=Tokenizer(name=str(folder)),
        )

    results: list[Any] = []
    for processes in (1, 2):
        records = read_records(config(processes))
        loaded = pipeline.load_tokenizer(config(processes), records, ["instruction"])
        encoder = Encoder(loaded, config(processes), ["instruction"])
        made_at = pipeline.encode(records, encoder, loaded, config(processes))
        results.append({file.name: file.read_bytes() for file in made_at.iterdir() if file.suffix in (".bin", ".npy")})
        results.append(json.loads((made_at / "meta.json").read_text()))
        made_at.rename(tmp_path / f"done-{processes}")
    assert results[:2] == results[2:]
    assert results[1]["report"]["refused"] == {"count": 1, "first": [["a.jsonl:40", "response is null"]]}


class ThreadWorld:
    """Ranks that are threads of this process; all the data preparation needs of a process group."""

    def __init__(self, rank: int, shared: list[str], barrier: Barrier) -> None:
        self.is_first = rank == 0
        self._shared, self._barrier = shared, barrier

    def barrier(self) -> None:
        self._barrier.wait(200)

    def share_text(self, text: str) -> str:
        if self.is_first:
            self._shared[:] = [text]
        self._barrier.wait(200)
        (found,) = self._shared
        self._barrier.wait(200)
        return found

    def log(self, text: str) -> None:
        pass

    note = log


def test_every_rank_has_the_template_that_rank_0_chose_and_texts_need_none(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    family_tokenizer(None, adds_bos=True).save_pretrained(str(folder))
    (tmp_path / "unusable.jinja").write_text("{{ raise_exception('no') }}")

    def templates(path: Path, template: str) -> list[Any]:
        config = Config(
            data=Data(path=str(path), chat_template=template, packing=False),
            training=Training(sequence_length=64),
            tokenizer=Tokenizer(name=str(folder)),
        )
        shared, barrier = list[str](), Barrier(2)

        def rank(number: int) -> Any:
            world: Any = ThreadWorld(number, shared, barrier)
            made, _, examples = pipeline.prepare(config, world, tmp_path, None)
            assert len(examples.rows) == 2
            return made.chat_template

        with ThreadPoolExecutor(2) as ranks:
            return list(ranks.map(rank, range(2)))

    one, two = templates(chats(tmp_path / "chats.jsonl", "red", "blue"), "chatml")
    assert one == two
    assert one.startswith("{{ bos_token }}")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "hello"}\n{"text": "world"}\n')
    assert templates(texts, str(tmp_path / "unusable.jinja")) == [None, None]
