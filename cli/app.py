"""The command `dflash-mlx`: its commands, and the one place where errors become a line and an exit code."""

import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_mlx import __version__
from dflash_mlx.cli import (
    bench,
    cache,
    chat,
    convert,
    default,
    doctor,
    generate,
    launch,
    models,
    parity,
    pull,
    quantize,
    serve,
    train,
)
from dflash_mlx.cli.output import marked, styled
from dflash_mlx.errors import DFlashError
from dflash_mlx.ranks import started_together

INTERRUPTED = 128 + 2  # as a shell reports SIGINT
READER_GONE = 128 + 13  # as a shell reports SIGPIPE

# Typer may carry its own copy of click, so click's exceptions are found through what Typer exports.
_ClickUsageError = typer.BadParameter.__mro__[1]
_ClickException = typer.BadParameter.__mro__[2]


class _Interrupted(Exception):  # noqa: N818  not an error
    """Ctrl-C, on its way past Typer."""


class _ReaderGone(Exception):  # noqa: N818  not an error
    """A broken pipe, on its way past Typer."""


class _Commands(TyperGroup):
    """Typer turns these two into exit codes of its own, without a word; here they get past it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except BrokenPipeError:
            raise _ReaderGone from None


app = typer.Typer(
    name="dflash-mlx",
    cls=_Commands,
    help="\n\n".join(
        (
            "Make a language model answer sooner, with the very same words.",
            "A small helper model, the [bold]drafter[/bold], guesses several tokens at once. Your model checks all of "
            "them in one pass and keeps those that it would have written itself. "
            "Nothing about the answer changes; only the waiting does.",
        )
    ),
    epilog='Try it, no account needed:  dflash-mlx generate "Why is the sky blue?" --pair demo',
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _add(name: str, command: Callable[..., None], epilog: str | None = None) -> None:
    """Register a command. Its docstring's paragraphs become single lines, which the terminal wraps."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(" ".join(p.split()) for p in paragraphs), epilog=epilog)(command)


_add("generate", generate.generate_command, generate.EXAMPLES)
_add("chat", chat.chat_command, chat.EXAMPLES)
app.add_typer(bench.bench_app, name="bench", epilog=bench.EXAMPLES)
_add("serve", serve.serve_command, serve.EXAMPLES)
app.add_typer(models.models_app, name="models", epilog=models.EXAMPLES)
_add("default", default.default_command, default.EXAMPLES)
_add("pull", pull.pull_command, pull.EXAMPLES)
app.add_typer(cache.cache_app, name="cache", epilog=cache.EXAMPLES)
_add("quantize", quantize.quantize_command, quantize.EXAMPLES)
_add("parity", parity.parity_command, parity.EXAMPLES)
_add("train", train.train_command, train.EXAMPLES)
_add("launch", launch.launch_command, launch.EXAMPLES)
_add("convert", convert.convert_command, convert.EXAMPLES)
_add("doctor", doctor.doctor_command, doctor.EXAMPLES)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dflash-mlx {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks, and the libraries' messages. Works after any command, too."),
    ] = False,
) -> None:
    # main() has taken --debug out already, wherever it stood; it is declared for --help.
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. The console script comes here through dflash_on_mlx.py."""
    code = _run(argv)
    if started_together():
        from dflash_mlx.ranks.group import leave_group

        leave_group(code)
    return code


def _run(argv: list[str] | None) -> int:
    debug, arguments = _take_debug(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        # A model may write any character; a terminal in an old encoding must not end the answer.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not debug:
        _quiet_libraries()
    try:
        if started_together():
            from dflash_mlx.targets.machines import other_machines

            other_machines()  # of all ranks, only rank 0 goes on
        code = typer.main.get_command(app).main(args=arguments, prog_name="dflash-mlx", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # Ctrl-C outside a command: while options were read, or after its end
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (_ReaderGone, BrokenPipeError):
        return _leave_quietly()
    except (_Interrupted, KeyboardInterrupt, typer.Abort):
        _say("stopped.", "dim")
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = explain(error)
        _say(marked("error:", message, "red", sys.stderr), None)
        return code


def explain(error: Exception) -> tuple[str, int]:
    """What to tell the user about an exception, and the exit code."""
    if isinstance(error, DFlashError):
        return str(error), error.exit_code
    if isinstance(error, _ClickException):
        message = getattr(error, "format_message", error.__str__)()
        if isinstance(error, _ClickUsageError):
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "dflash-mlx"
            hint = " Put a prompt of several words in quotes." if "unexpected extra argument" in message else ""
            end = "" if message.endswith("?") else "."
            return f"{message.rstrip('.')}{end}{hint} See: {path} --help", 2
        return message, 1
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}", 1
    if isinstance(error, MemoryError) or "malloc" in str(error) or "out of memory" in str(error).lower():
        return f"not enough memory ({error}); close other programs or take a smaller model", 1
    if isinstance(error, ImportError) and "libcuda" in str(error):
        return (
            f"MLX was installed for NVIDIA GPUs, and this machine lacks their driver ({error}); install it",
            1,
        )
    found = f"{type(error).__name__}: {error}"
    return f"{found} - this is a bug in dflash-mlx, please report it; --debug shows where it happened", 1


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """--debug is allowed anywhere before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(head) < end, head + arguments[end:]


def _quiet_libraries() -> None:
    """Keep the libraries' warnings, logs and progress bars off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())
    for name in ("transformers", "huggingface_hub", "httpx", "filelock", "tqdm"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _say(line: str, style: str | None) -> None:
    """A line on stderr, which may itself be gone."""
    try:
        print(styled(line, style, sys.stderr) if style else line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _leave_quietly()


def _leave_quietly() -> int:
    """The reader of our output left (`| head`): point it nowhere, so that the interpreter's last flush is silent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            os.dup2(nowhere, stream.fileno())
    return READER_GONE


if __name__ == "__main__":
    sys.exit(main())
