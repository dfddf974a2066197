"""The commands of the group "train" of ``ftmon --help``."""

import argparse
from typing import TYPE_CHECKING

from .argument_types import byte_size, lengths, positive, price
from .parts import add_ascii, add_command, add_overrides, add_run, add_start_options

if TYPE_CHECKING:
    from .parts import Commands


def add(commands: "Commands") -> None:
    """Add the group's commands."""
    _predict(commands)
    _demo(commands)
    _train(commands)
    _resume(commands)
    _sweep(commands)
    _data(commands)
    _chat(commands)


def _predict(commands: "Commands") -> None:
    predict = add_command(
        commands,
        "predict",
        "train.predict:predict",
        "predict the memory of a training step, without a GPU",
        usage="ftmon predict [options] CONFIG.yaml [key.sub=value ...] | --model M [options] | [options] -- COMMAND",
    )
    predict.set_defaults(command=[])
    predict.epilog = (
        "COMMAND starts a script: deepspeed, torchrun, accelerate launch or python. The script is run up to "
        "deepspeed.initialize. "
        "The allocator's settings are read from PYTORCH_ALLOC_CONF, or else PYTORCH_CUDA_ALLOC_CONF. Exit status: 0 "
        "predicted, 2 wrong usage or a configuration that cannot be used. Method and errors: docs/predict.md."
    )
    predict.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="the configuration that 'ftmon train' would run"
    )
    add_overrides(predict)
    predict.add_argument(
        "--ranks", type=positive, metavar="N", help="GPUs of the run (default: the configuration's, or 1)"
    )
    predict.add_argument(
        "--sequence-length", type=lengths, metavar="S[,S...]", help="in tokens (default: the configuration's, or 1024)"
    )
    script = predict.add_argument_group("with --model, or to change what '-- COMMAND' predicts")
    script.add_argument(
        "--model",
        metavar="FOLDER|NAME|FILE",
        help="a folder with config.json, a name on the Hugging Face Hub, or a file",
    )
    script.add_argument("--deepspeed", metavar="FILE", help="DeepSpeed's configuration (default: bf16, ZeRO stage 0)")
    script.add_argument(
        "--micro-batch", type=positive, metavar="B", help="sequences per GPU (default: the file's, or 1)"
    )
    script.add_argument(
        "--accumulation", type=positive, metavar="A", help="micro-steps per step (default: the file's, or 1)"
    )
    script.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, without use_reentrant")
    script.add_argument("--lora-rank", type=positive, metavar="R", help="LoRA on the linear layers, with peft")
    script.add_argument(
        "--optimizer",
        choices=("deepspeed", "torch"),
        help="use DeepSpeed's or PyTorch's AdamW instead of the configuration's",
    )
    predict.add_argument(
        "--capacity",
        type=byte_size,
        metavar="SIZE",
        help="memory that PyTorch may reserve on a GPU, such as 24GiB; reports whether the step fits",
    )
    predict.add_argument(
        "--data",
        action="store_true",
        help="also read CONFIG.yaml's data set and report which steps of an epoch do not fit",
    )
    predict.add_argument(
        "--largest",
        action="store_true",
        help="search the largest sequence length and micro-batch that fit each GPU, or --capacity (takes minutes)",
    )
    predict.add_argument(
        "--what-if",
        action="store_true",
        help="also predict changes of the configuration, the cheapest that fits first (takes minutes)",
    )
    predict.add_argument("--gpu", metavar="NAME", help="the kind of GPU, such as 'A100 80 GB' (default: H200)")
    predict.add_argument(
        "--price", type=price, metavar="P", help="price of a GPU hour in any currency, for the cost of tokens"
    )
    predict.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _demo(commands: "Commands") -> None:
    demo = add_command(commands, "demo", "train.start:demo", "fine-tune a small model and watch it")
    demo.add_argument(
        "--fault",
        metavar="KIND[:rank=R,step=S]",
        help="cause a real fault: spike, hang, slow, oom, crash or stop",
    )
    demo.add_argument("--steps", type=positive, metavar="N", help="optimizer steps to train")
    demo.add_argument(
        "--ranks", type=positive, metavar="N", help="how many ranks (default: every GPU, or 2 on the CPU)"
    )
    add_overrides(demo)
    _no_predict(demo)
    add_start_options(demo)


def _train(commands: "Commands") -> None:
    train = add_command(commands, "train", "train.start:train", "train with a configuration of your own, and watch it")
    train.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration")
    train.add_argument("--print-config", action="store_true", help="print a commented default configuration and exit")
    train.add_argument("--push", metavar="REPOSITORY", help="upload the final model to the Hugging Face Hub")
    add_overrides(train)
    _no_predict(train)
    add_start_options(train)


def _resume(commands: "Commands") -> None:
    resume = add_command(
        commands, "resume", "train.start:resume", "continue a run of 'ftmon train' from its newest complete checkpoint"
    )
    resume.epilog = (
        "The new run has the configuration of RUN with the given keys changed. A change with which training would "
        "not continue exactly is refused by name; checkpoint.allow=[NAME] accepts it (docs/training.md)."
    )
    add_run(resume)
    add_overrides(resume)
    _no_predict(resume)
    add_start_options(resume)


def _no_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-predict", action="store_true", help="do not predict the run's memory in the background (GPU runs)"
    )


def _sweep(commands: "Commands") -> None:
    sweep = add_command(commands, "sweep", "train.sweep:sweep", "measure many configurations, each in a run of its own")
    sweep.epilog = (
        "Rows are kept in SWEEP.results.jsonl; the same command resumes an interrupted sweep. Exit status: 0 every run "
        "has a row, also failed ones; 1 the sweep ended early; 2 wrong usage or an invalid sweep file; 130 "
        "interrupted. Format of the sweep file: docs/sweep.md."
    )
    sweep.add_argument("sweep", metavar="SWEEP.yaml", help="what is varied, over which values, within which budget")
    sweep.add_argument("--output", metavar="FILE", help="file of the rows (default: SWEEP.results.jsonl beside it)")
    sweep.add_argument("--plan", action="store_true", help="print the planned runs with predictions, and exit")
    sweep.add_argument(
        "--fail-fast", action="store_true", help="run likely failures first, and end at the first failure"
    )
    sweep.add_argument("--json", action="store_true", help="one JSON object at the end; progress on standard error")
    sweep.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    add_ascii(sweep)


def _data(commands: "Commands") -> None:
    data = add_command(commands, "data", "train.data:check", "check what the model will see of the training data")
    parts = data.add_subparsers(metavar="ACTION", required=True)
    check = add_command(parts, "check", "train.data:check", "show tokens, labels, lengths and problems of the data")
    check.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    check.add_argument("--json", action="store_true", help="one JSON object for scripts")
    check.add_argument("--samples", type=positive, default=3, metavar="N", help="records to show (default: 3)")
    check.add_argument("--color", action="store_true", help="use colours even if the output is not a terminal")
    check.epilog = (
        "Exit status: 0 no problems, 1 problems found, 2 wrong usage or a configuration with which no training would "
        "start (such as an unusable chat template)."
    )
    add_overrides(check)


def _chat(commands: "Commands") -> None:
    chat = add_command(
        commands, "chat", "train.chat:chat", "chat with a trained model, or with a checkpoint of a live run"
    )
    chat.epilog = (
        "With piped standard input, each line is a separate message and each answer one line (line ends in it are "
        "written as \\n); --whole makes the entire input one message."
    )
    chat.add_argument(
        "target",
        metavar="MODEL|RUN",
        help="a model's folder, an output folder, a checkpoint, a run, or a name on the Hugging Face Hub",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the most likely token (default: the model's own, or 0.7)",
    )
    chat.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    chat.add_argument("--max-tokens", type=positive, metavar="N", help="maximum length of an answer (default: 512)")
    chat.add_argument("--seed", type=int, metavar="N", help="seed of the sampling, for reproducible answers")
    chat.add_argument("--device", choices=("auto", "cpu", "cuda"), help="auto: a GPU; for a checkpoint, the CPU")
    chat.add_argument("--whole", action="store_true", help="treat the entire piped input as one message")
    chat.add_argument("--debug", action="store_true", help="show the tokens that are sent and received")
