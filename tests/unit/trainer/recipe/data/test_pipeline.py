"""From files to rows: what is kept, refused, cached and counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data, Evaluation, File, Training
from ftmon.trainer.recipe.data import encode, pipeline
from ftmon.trainer.recipe.data.encode import Encoder
from ftmon.trainer.recipe.data.pipeline import Examples
from ftmon.trainer.recipe.data.records import Records, read_records
from ftmon.trainer.recipe.evaluation import evaluate
from ftmon.trainer.recipe.model.loss import IGNORED
from small_tokenizer import family_tokenizer

WORDS = ["hello", "world", "rank", "colour", "red", "blue", "paris", "france", "two", "four"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_documents_are_in_the_cache_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.config import HF_DATASETS_CACHE

    monkeypatch.undo()
    assert pipeline.cache_folder() == HF_DATASETS_CACHE / "ftmon-tokens"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = family_tokenizer(None, adds_bos=True)
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return made


def texts(path: Path, count: int, longest: int = 40, seed: int = 0) -> list[str]:
    generator = numpy.random.default_rng(seed)
    made = [" ".join(generator.choice(WORDS, generator.integers(1, longest))) for _ in range(count)]
    write(path, *({"text": text} for text in made))
    return made


def encoded(config: Config, tokenizer: Any, progress: Any = None) -> tuple[Path, Records]:
    records = read_records(config)
    encoder = Encoder(tokenizer, config, pipeline.record_formats(records, config))
    return pipeline.encode(records, encoder, tokenizer, config, progress=progress), records


def build(config: Config, tokenizer: Any) -> Examples:
    return pipeline.examples(*encoded(config, tokenizer), config)


def of(path: Path, length: int = 64, **data: Any) -> Config:
    return Config(data=Data(path=str(path), **{"packing": False, **data}), training=Training(sequence_length=length))


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chats(path: Path, *answers: Any) -> Path:
    return write(path, *({"prompt": f"hello {number}", "response": answer} for number, answer in enumerate(answers)))


def documents(examples: Examples) -> list[list[int]]:
    found: list[list[int]] = []
    for row in examples.rows:
        ends = numpy.cumsum(row.get("lengths", [len(row["input_ids"])]))[:-1]
        found += [part.tolist() for part in numpy.split(row["input_ids"], ends)]
    return sorted(found)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("length", [16, 64, 300])
def test_of_texts_every_token_is_trained_on_exactly_once(tmp_path, tokenizer, packing, length):
    made = texts(tmp_path / "a.jsonl", 60, 120)
    examples = build(of(tmp_path / "a.jsonl", length, packing=packing), tokenizer)
    wanted = [[tokenizer.bos_token_id, *tokenizer(t, add_special_tokens=False)["input_ids"]] for t in made]
    wanted = [[*ids, tokenizer.eos_token_id] for ids in wanted]
    tokens = Counter(token for document in documents(examples) for token in document)
    assert tokens == Counter(token for ids in wanted for token in ids)
    assert examples.tokens.sum() == sum(map(len, wanted))
    assert examples.tokens.max() <= length
    if length == 300:
        assert documents(examples) == sorted(wanted)


def test_packing_loses_none_of_long_documents_and_a_share_of_a_single_record_is_refused(tmp_path, tokenizer):
    made = texts(tmp_path / "a.jsonl", 8, 4000)
    examples = build(of(tmp_path / "a.jsonl", 64, packing=True), tokenizer)
    total = sum(len(tokenizer(text)["input_ids"]) + 1 for text in made)
    assert examples.tokens.sum() == total > 8 * 64
    assert examples.tokens.mean() > 60
    texts(tmp_path / "a.jsonl", 1, 200)
    config = msgspec.structs.replace(of(tmp_path / "a.jsonl", 16), evaluation=Evaluation(share=0.5))
    with pytest.raises(ConfigError, match="1 records cannot be split"):
        build(config, tokenizer)


@pytest.mark.parametrize("packing", [False, True])
def test_the_counts_of_a_row_are_those_of_its_labels(tmp_path, tokenizer, packing):
    path = chats(tmp_path / "a.jsonl", *["red blue " * count for count in range(1, 30)])
    examples = build(of(path, packing=packing), tokenizer)
    for index, row in enumerate(examples.rows):
        assert len(row["input_ids"]) == len(row["labels"]) == examples.tokens[index]
        assert (row["labels"][1:] != IGNORED).sum() == examples.label_tokens[index] > 0
        assert (row["labels"][numpy.cumsum([0, *row.get("lengths", [])[:-1]])] == IGNORED).all()


def test_records_that_are_refused_are_counted_by_line_and_too_many_refuse_the_run(tmp_path, tokenizer):
    path = chats(tmp_path / "a.jsonl", "red", None, "blue", "")
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ConfigError) as raised:
        build(of(path), tokenizer)
    assert str(raised.value) == (
        "data: 3 of 5 records are refused, more than data.max_refused (0.01 of them) allows: a.jsonl:2: response is "
        "null; a.jsonl:4: response is empty; a.jsonl:5: is not JSON: Expecting property name enclosed in double quotes "
        "at column 2; 'ftmon data check' lists more"
    )
    examples = build(of(path, max_refused=0.6), tokenizer)
    assert (len(examples.rows), examples.read, examples.report.refused.count) == (2, 5, 3)
    assert examples.report.notes()[0].startswith("3 of 5 records refused, the first a.jsonl:2: response is null")


def test_records_whose_labels_are_all_cut_away_are_counted_and_listed(tmp_path, tokenizer):
    long = {"prompt": "hello " * 50, "response": "never reached"}
    path = write(tmp_path / "a.jsonl", {"prompt": "hello", "response": "red"}, long)
    report = build(of(path, 24), tokenizer).report
    assert (report.cut.count, report.unlabelled.first) == (1, [("a.jsonl:2", "its labels are all cut away")])
    examples = build(of(path, 24, truncation="keep_end"), tokenizer)
    assert (examples.report.unlabelled.count, len(examples.rows)) == (0, 2)
    assert build(of(path, 24, truncation="drop"), tokenizer).report.dropped.first[0][0] == "a.jsonl:2"
    with pytest.raises(ConfigError, match="no record holds a token to learn"):
        build(of(chats(path, "red"), 8), tokenizer)


def test_tokens_on_disk_are_used_again_until_anything_they_depend_on_changes(tmp_path, tokenizer, cache, monkeypatch):
    path = chats(tmp_path / "a.jsonl", "red", "blue")
    key = build(of(path), tokenizer).key

    def folders() -> int:
        return len(list(cache.iterdir()))

    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    assert build(of(copy), tokenizer).key == key
    assert build(of(path, packing=True), tokenizer).key != key
    assert folders() == 1
    for changes in (
        lambda: of(path, train_on="all"),
        lambda: of(path, 32),
        lambda: monkeypatch.setattr(encode, "ENCODING_VERSION", encode.ENCODING_VERSION + 1),
        lambda: setattr(tokenizer, "chat_template", tokenizer.chat_template + " "),
        lambda: setattr(tokenizer, "eos_token", "<|end|>"),
        lambda: chats(path, "red", "changed") and None,
    ):
        before = folders()
        last = build(changes() or of(path), tokenizer).key
        assert folders() == before + 1
    assert last != key


def test_a_tokenization_that_fails_leaves_nothing_and_damaged_tokens_are_made_anew(tmp_path, tokenizer, cache):
    config = of(chats(tmp_path / "a.jsonl", "red", "blue"))

    def interrupt(done: int) -> None:
        assert list(cache.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoded(config, tokenizer, interrupt)
    assert list(cache.iterdir()) == []
    before = documents(build(config, tokenizer))
    (folder,) = cache.iterdir()
    (folder / "ids.bin").write_bytes(b"torn")
    assert documents(build(config, tokenizer)) == before


def test_a_weight_says_how_often_each_record_of_a_file_is_used(tmp_path, tokenizer):
    one, two = chats(tmp_path / "a.jsonl", "red", "blue"), chats(tmp_path / "b.jsonl", *["four"] * 10)
    files = [File(str(one), 2.0), File(str(two), 0.3)]
    config = Config(data=Data(files=files), training=Training(sequence_length=64))
    found = Counter(tokenizer.decode(ids).count("four") for ids in documents(build(config, tokenizer)))
    assert found == {0: 4, 1: 3}
    assert documents(build(config, tokenizer)) == documents(build(config, tokenizer))


@pytest.mark.parametrize("packing", [False, True])
def test_no_copy_of_a_record_that_is_set_aside_is_trained_on(tmp_path, tokenizer, packing):
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    # Long texts are split: their pieces must stay on one side.
    wanted = [*texts(one, 40, 60, seed=1), *texts(two, 40, 60, seed=2)]
    config = Config(
        data=Data(files=[File(str(one), 3.0), File(str(two), 0.5)], packing=packing),
        training=Training(sequence_length=32),
        evaluation=Evaluation(share=0.25),
    )
    folder, records = encoded(config, tokenizer)
    trained, aside = pipeline.examples(folder, records, config), pipeline.held_out(folder, config)

    def used(examples: Examples) -> set[int]:
        return {record for row in range(len(examples.rows)) for record in examples.rows.records(row)}

    held, taught = used(aside), used(trained)
    assert len(held) == 20
    assert not held & taught
    assert "lengths" not in aside.rows[0]
    ends = [tokenizer.eos_token_id]
    tokens = Counter(token for record in held for token in tokenizer(wanted[record])["input_ids"] + ends)
    assert Counter(token for ids in documents(aside) for token in ids) == tokens
    whole, half = set(range(40)) - held, set(range(40, 80)) - held
    assert taught & set(range(40)) == whole
    assert len(taught & half) == round(len(half) / 2)
    assert pipeline.held_out(folder, config).key == aside.key
    limited = msgspec.structs.replace(config, evaluation=Evaluation(share=0.25, limit=3))
    first = evaluate.held_out(limited, None, tokenizer, folder)
    ids = [row["input_ids"].tolist() for row in aside.rows]
    assert [row["input_ids"].tolist() for row in first.rows] == ids[:3]
    assert len(first.tokens) == len(first.label_tokens) == 3


@pytest.mark.parametrize(
    ("records", "settings", "held_out"),
    [
        (1_200, Evaluation(), 24), (999, Evaluation(), 0), (999, Evaluation(every=3), 20),
        (1_200, Evaluation(share=0.0, every=0), 0), (1_200, Evaluation(path="held-out.jsonl"), 0),
        (40, Evaluation(share=0.5), 20),
    ],
)  # fmt: skip
def test_the_held_out_records_are_those_of_a_plain_draw_and_untrained(tmp_path, tokenizer, records, settings, held_out):
    texts(tmp_path / "a.jsonl", records, 3)
    for seed in (42, 7):
        training = Training(sequence_length=16, seed=seed)
        config = Config(data=Data(path=str(tmp_path / "a.jsonl")), training=training, evaluation=settings)
        folder, _ = encoded(config, tokenizer)
        drawn = torch.randperm(records, generator=torch.Generator().manual_seed(seed)).tolist()
        expected = sorted(drawn[:held_out])
        trained = pipeline.examples(folder, None, config)
        # Another rank, and a run that resumes, begin from the folder alone.
        for again in (config, pipeline.settle_evaluation(config, folder, total=101)):
            rows = pipeline.examples(folder, None, again).rows
            taught = [record for row in range(len(rows)) for record in rows.records(row)]
            assert sorted(taught) == [record for record in range(records) if record not in expected]
            assert pipeline.examples(folder, None, again).key == trained.key
        settled = pipeline.settle_evaluation(config, folder, total=101).evaluation
        assert settled.interval == (settings.interval or 11 if held_out or settings.path else 0)
        if held_out:
            aside = pipeline.held_out(folder, config)
            assert [aside.rows.records(row) for row in range(held_out)] == [[record] for record in expected]


def test_of_a_part_of_an_epoch_a_part_of_the_held_out_examples_is_evaluated(tmp_path, tokenizer):
    texts(tmp_path / "a.jsonl", 2_000, 3)
    config = Config(data=Data(path=str(tmp_path / "a.jsonl")), training=Training(sequence_length=16))
    folder, _ = encoded(config, tokenizer)
    whole = pipeline.held_out(folder, config)
    for epochs, count in ((3.0, 40), (0.75, 30), (0.1, 20)):
        found = evaluate.held_out(config, None, tokenizer, folder, epochs)
        assert found is not None
        chosen = [whole.rows.records(number * 40 // count) for number in range(count)]
        assert [found.rows.records(row) for row in range(len(found.rows))] == chosen
    given = msgspec.structs.replace(config, evaluation=Evaluation(share=0.02))
    assert len(evaluate.held_out(given, None, tokenizer, folder, 0.1).rows) == 40  # type: ignore[union-attr]


def test_evaluation_batches_hold_each_row_once_and_no_more_tokens_than_a_packed_micro_batch():
    lengths = numpy.random.default_rng(1).integers(1, 65, 200)
    for packing, given in ((True, 0), (True, 3), (False, 0)):
        config = Config(
            data=Data(packing=packing),
            training=Training(micro_batch=2, sequence_length=64),
            evaluation=Evaluation(micro_batch=given),
        )
        batches = evaluate.divided(config, lengths)
        assert sorted(row for rows in batches for row in rows) == list(range(200))
        sizes = [len(rows) * -(-max(lengths[row] for row in rows) // 8) * 8 for rows in batches]
        assert max(sizes) == sizes[0]
        assert sizes[0] <= (given or 2) * 64
        if packing and not given:
            assert min(sizes[:-1]) > 128 - 64, "short rows fill a batch"
        else:
            assert {len(rows) for rows in batches} <= {given or 2, 200 % (given or 2)}


@pytest.mark.parametrize(
    ("records", "letters", "cores", "processes"),
    [(3_200, 130, 2, 1), (3_200, 130, 16, 1), (3_200, 180, 16, 12), (3_200, 180, 4, 4), (20, 9_000, 16, 1)],
)
def test_data_are_encoded_beside_the_rank_where_that_takes_longer_than_the_imports(
    tmp_path, monkeypatch, records, letters, cores, processes
):
    monkeypatch.setattr(pipeline.hardware, "cores", lambda: cores)
    for name in ("_LETTERS_ALONE", "_LETTERS_OF_A_PROCESS"):
        monkeypatch.setattr(pipeline, name, getattr(pipeline, name) // 100)
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': 'a' * letters})}\n" * records)
    found = read_records(Config(data=Data(path=str(tmp_path / "a.jsonl"))))
    assert pipeline._processes(found, Config()) == processes
    assert pipeline._processes(found, Config(data=Data(processes=3))) == 3
