"""Configuration of the training data."""

from typing import Literal

import msgspec

from ..config.fields import AtLeast0, Fraction, Positive, Section

Format = Literal["auto", "text", "instruction", "alpaca", "chat", "sharegpt", "markers"]


class File(Section, frozen=True):
    """One file of several."""

    path: str
    """The file; see `data.path`."""
    weight: Positive = 1.0
    """How often each of its records is used in an epoch: 2 uses all twice, 0.5 a half drawn with `training.seed`."""


class Data(Section, frozen=True):
    """The training data: one of `path`, `files` and `name` is needed."""

    path: str = ""
    """A local file: .jsonl (one JSON record a line), .json (the same, or one list), .csv, .tsv, .parquet or .txt (one
    text a line)."""
    files: list[File] = msgspec.field(default_factory=list[File])
    """Several such files, each with its weight: [{path: a.jsonl, weight: 1}, ...]."""
    name: str = ""
    """Name of a data set on the Hugging Face hub, or a folder with a copy of one; read through `datasets`."""
    subset: str = ""
    """Configuration of that data set, where it has several."""
    split: str = "train"
    """Split of that data set, in the syntax of `datasets`: train, train[:10%] ..."""
    format: Format = "auto"
    """What a record is: text, instruction (prompt and response or completion), alpaca (instruction, input, output),
    chat (messages with role and content), sharegpt (conversations with from and value), markers (a text with Human:
    and Assistant:, [INST] or <|im_start|>); auto goes by the first record."""
    text_column: str = "text"
    """Column of the text, also of a text with markers."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    response_column: str = "response"
    """Column of the response; `completion` is found too."""
    messages_column: str = "messages"
    """Column of the messages; `conversations` is found too."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call: a list of JSON schemas, or its JSON text; passed to the template."""
    chat_template: str = ""
    """Chat template: empty takes the tokenizer's; the name of one that ships with ftmon (plain, chatml, llama3, gemma,
    mistral, phi3), or the path of a Jinja file; none joins prompt and response as they stand."""
    train_on: Literal["assistant", "last", "completion", "all"] = "assistant"
    """Which tokens carry loss: all assistant turns, the last one, what follows the prompt (the last user message, if
    the record does not separate a prompt), or all. A text is learned whole."""
    train_on_prompt: bool = False
    """Older name of `train_on: all`."""
    truncation: Literal["auto", "keep_start", "keep_end", "drop", "split"] = "auto"
    """What happens to records longer than `training.sequence_length`: their start or end is kept, they are dropped, or
    (text only) split into several. auto: split for text, keep_start for others."""
    max_refused: Fraction = 0.01
    """Share of records that may be refused (broken, of another format, rejected by the template) before the run is;
    they are never trained on."""
    packing: bool = False
    """Put several records into each sequence, without cutting any; they do not see each other."""
    group_by_length: bool = True
    """Without packing: batches of records of similar length, so that less is padded."""
    shuffle: bool = True
    """Visit the examples in a new order each epoch, drawn from `training.seed`."""
    limit: AtLeast0 = 0
    """Use only the first so many records; 0: all."""
    processes: AtLeast0 = 0
    """Processes that tokenize; 0: one a core."""
    workers: AtLeast0 = 0
    """Data-loading processes a rank; 0 loads in the rank itself."""
