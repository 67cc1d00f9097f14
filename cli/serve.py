"""`dflash-mlx serve`: the models behind the HTTP protocols of OpenAI, Anthropic and Ollama, and a page."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.output import note
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.server.service import Service

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx serve --pair demo

  dflash-mlx serve --pair demo --port 9000 --api-key my-secret --access-log

  dflash-mlx serve --model ./my-model --draft-model ./my-drafter --alias gpt-4o

  curl http://127.0.0.1:8080/v1/models
"""

SERVER = "How to serve"
GB = 10**9


def serve_command(
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.MethodOption = Method.auto,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    dtype: options.Precision = options.DType.auto,
    no_kernels: options.NoKernels = False,
    exact: options.Exact = False,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes any free one.", rich_help_panel=SERVER),
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Ask every request for this key; give the option once for each key. Other users of this machine can "
            "read options: DFLASH_MLX_API_KEY keeps a key to yourself.",
            envvar="DFLASH_MLX_API_KEY",
            rich_help_panel=SERVER,
        ),
    ] = None,
    no_key: Annotated[
        bool,
        typer.Option("--no-api-key", help="Let anyone in, also from other machines.", rich_help_panel=SERVER),
    ] = False,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", metavar="NAME", help="Another model name that requests may use.", rich_help_panel=SERVER
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="A name under which clients reach this server.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="A web page's origin that may use this server, such as http://localhost:3000; * is any.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_active: Annotated[
        int | None,
        typer.Option(
            "--max-active",
            metavar="N",
            min=1,
            help="Answers made at the same time, in shared rounds. (default: as many as gain speed on this machine)",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue",
            metavar="N",
            min=0,
            help="Answers that may wait; more are refused with 429.",
            rich_help_panel=SERVER,
        ),
    ] = 64,
    cache_gb: Annotated[
        float | None,
        typer.Option(
            "--cache-gb", metavar="X", min=0, help="Memory for the caches of conversations.", rich_help_panel=SERVER
        ),
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            "--memory-gb",
            metavar="X",
            min=0,
            help="Memory for models, caches and answers together.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0,
            help="The longest time for an answer; 0: no limit.",
            rich_help_panel=SERVER,
        ),
    ] = 3600.0,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Write a line for each request, to stderr.", rich_help_panel=SERVER)
    ] = False,
    max_tokens: options.MaxTokens = 8192,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
) -> None:
    """Serve a model to other programs: the protocols of OpenAI, Anthropic and Ollama, and a page for the browser.

    It takes requests from this machine only, unless --host says otherwise, and answers them with the model that was
    named here. The sampling options hold where a request says nothing. Ctrl-C ends it.
    """
    keys = _keys(api_key or [], host, no_key=no_key)
    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        method=method,
        no_draft=no_draft,
        block_size=block_size,
        dtype=dtype,
        no_kernels=no_kernels,
        exact=exact,
    )
    # The address is taken first: loading can take a minute, and a port in use is known at once.
    from dflash_mlx.server.run import END_SECONDS, address_of, make_server, open_socket

    with closing(open_socket(host, port)) as listener:
        opened = choice.open()
        from dflash_mlx.server.app import create_app
        from dflash_mlx.server.parameters import Defaults
        from dflash_mlx.server.security import Policy, is_loopback, normalized, own_names
        from dflash_mlx.server.service import Limits, Service, served_name
        from dflash_mlx.server.worker import Worker

        service = Service(
            pair=opened,
            worker=Worker(
                opened,
                draft=not no_draft,
                max_queue=max_queue,
                max_active=max_active,
                cache_bytes=_bytes(cache_gb),
                memory_bytes=_bytes(memory_gb),
                report=lambda message, _: note(message),
            ),
            names=tuple(dict.fromkeys((served_name(opened), *_aliases(pair), *(alias or ())))),
            defaults=Defaults(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p),
            limits=Limits(answer_seconds=timeout),
        )
        hosts = (*own_names(host), *normalized(allowed_host or ()))
        policy = Policy(keys=keys, hosts=hosts, origins=tuple(cors_origin or ()))
        app = create_app(service, policy, access_log=_log if access_log else None)
        address = address_of(listener)
        server = make_server(
            app,
            on_ready=lambda: _announce(service, address, bool(keys), is_loopback(host)),
            on_end=lambda: service.worker.close(END_SECONDS),
        )
        server.run(sockets=[listener])
    note("stopped.")


def _keys(keys: list[str], host: str, *, no_key: bool) -> tuple[str, ...]:
    """The keys that requests need. Raises UsageError where none would let the whole network in."""
    from dflash_mlx.server.security import is_loopback

    if any(not key.strip() for key in keys):
        raise UsageError("--api-key is empty; give a key, or leave the option out.")
    if keys and no_key:
        raise UsageError("--api-key and --no-api-key contradict each other; give one of them.")
    if not keys and not no_key and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines in; ask for a key with --api-key, or let anyone in with --no-api-key."
        )
    return tuple(keys)


def _aliases(pair: str | None) -> tuple[str, ...]:
    """The other names of a known pair."""
    from dflash_mlx.hub.registry import find_pair

    return find_pair(pair).aliases if pair is not None else ()


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GB)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _announce(service: "Service", address: str, has_key: bool, is_private: bool) -> None:
    """What was loaded, where it is, and how to try it."""
    pair, name = service.pair, service.names[0]
    drafting = f"drafting blocks of {pair.block_size}" if pair.drafter is not None else "plain decoding"
    note(f"{name} ({drafting}), loaded in {pair.load_seconds:.1f} s", style="bold")
    note(f"listening on {address}  (Ctrl-C ends it)", style="green")
    if not is_private and not has_key:
        note("Everyone who can reach this machine can use this server: there is no API key.", style="yellow")
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    note(f"chat:     {address}/  in a browser")
    note(
        f"try it:   curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
        f"OpenAI:   OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={'KEY' if has_key else 'none'}\n"
        f"Claude:   ANTHROPIC_BASE_URL={address} ANTHROPIC_AUTH_TOKEN={'KEY' if has_key else 'none'} "
        f"ANTHROPIC_MODEL={name}",
        copyable=True,
    )
