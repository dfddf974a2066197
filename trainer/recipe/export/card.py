"""The model card: the trained model, its data and its results."""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ....protocol.run.environment import RUN_ENV
from ....protocol.run.rundir import RunDir
from ....protocol.text import duration
from ..config import write
from ..config.schema import Config
from ..state import TrainState

_GIB = 1 << 30


@dataclass(frozen=True)
class Results:
    """Results of a run."""

    state: TrainState
    model_type: str
    parameters: int
    """Parameters of the whole model."""
    trained: int
    """Parameters that were trained."""
    loss: float | None = None
    """Loss of the last printed step, over all ranks."""
    evaluation_loss: float | None = None
    """Loss of the latest evaluation."""
    best_evaluation_loss: float | None = None
    """Loss of the best evaluation."""


def text(config: Config, results: Results) -> str:
    """Return the card in Markdown, with the hub's metadata on top."""
    state = results.state
    source = config.model.name or f"random weights ({results.model_type})"
    lora = config.lora
    how = (
        "all weights"
        if not lora.rank
        else f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}" + (", merged" if lora.merge else ", adapters only")
    )
    rows: list[tuple[str, str]] = [
        ("base model", source),
        ("parameters", f"{results.parameters:,}, of which {results.trained:,} were trained ({how})"),
        ("data", f"{_data(config)}: {state.examples:,} examples (content {state.data_key})"),
        ("optimizer steps", f"{state.step:,} of {state.global_batch} examples"),
        ("tokens", f"{state.tokens:,}, of which {state.label_tokens:,} carried loss"),
        ("precision", f"{config.training.precision}, ZeRO-{config.zero.stage}, {state.ranks} ranks"),
    ]
    if results.loss is not None:
        rows.append(("loss of the last step", f"{results.loss:.4f}"))
    for name, loss in (("last", results.evaluation_loss), ("best", results.best_evaluation_loss)):
        if loss is not None:
            at = f" (step {state.best_evaluation_step:,})" if name == "best" and state.best_evaluation_step else ""
            rows.append((f"{name} evaluation loss", f"{loss:.4f}{at}"))
    rows += _recorded()
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    name = config.output.push.rpartition("/")[2] or config.run.name or "model"
    return (
        f"{_metadata(config)}# {name}\n\nTrained with ftmon.\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"## Configuration\n\n```yaml\n{write.dump(config).strip()}\n```\n"
    )


def _data(config: Config) -> str:
    data = config.data
    return data.path or data.name or ", ".join(f"{file.path} (weight {file.weight:g})" for file in data.files)


def _metadata(config: Config) -> str:
    lines = ["---", "pipeline_tag: text-generation", "tags:", "- ftmon"]
    lines.append(f"library_name: {'peft' if config.lora.rank and not config.lora.merge else 'transformers'}")
    if config.model.name and not Path(config.model.name).exists():
        lines.append(f"base_model: {config.model.name}")
    if config.data.name and not Path(config.data.name).exists():
        lines += ["datasets:", f"- {config.data.name}"]
    return "\n".join([*lines, "---", "", ""])


def _recorded() -> list[tuple[str, str]]:
    """Return figures of this run's recording, as far as it is written; empty without one."""
    run = os.environ.get(RUN_ENV)
    if not run:
        return []
    path = RunDir(run).recording
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0)
        try:
            return _figures(connection)
        finally:
            connection.close()
    except sqlite3.Error:
        return []


def _figures(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    (ranks,) = connection.execute("SELECT count(DISTINCT rank) FROM throughput").fetchone()
    steps, tokens, training_us, mfu = connection.execute(
        "SELECT count(*), sum(tokens), sum(training_us), avg(mfu) FROM throughput"
    ).fetchone()
    if not steps or not training_us:
        return []
    seconds = training_us / 1e6 / ranks
    found = [
        ("time in steps", duration(seconds)),
        ("tokens a second", f"{tokens / seconds:,.0f} over all ranks"),
    ]
    if mfu:
        found.append(("MFU", f"{100 * mfu:.1f} %"))
    (peak,) = connection.execute("SELECT max(allocated_peak) FROM steps").fetchone()
    if peak:
        found.append(("peak memory of a rank", f"{peak / _GIB:.2f} GiB"))
    return found
