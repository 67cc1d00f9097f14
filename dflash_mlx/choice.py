"""Which models and which way of drafting a caller means: a known pair by its name, or a target and a drafter."""

from dataclasses import dataclass

from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import UsageError
from dflash_mlx.hub.registry import ModelSource, find_pair, pair_called, parse_source
from dflash_mlx.hub.resolve import UnknownTargetError, pair_for_target


def method_called(name: str) -> Method:
    """Raises UsageError."""
    try:
        return Method(name)
    except ValueError:
        known = ", ".join(method.value for method in Method)
        raise UsageError(f"there is no method {name!r}; choose one of {known}.") from None


@dataclass(frozen=True)
class Choice:
    """What to load; drafter: None where the method needs none."""

    label: str
    target: ModelSource
    drafter: ModelSource | None
    method: Method
    warning: str | None = None


def choose_models(name: str | None, model: str | None, draft_model: str | None, method: Method) -> Choice:
    """What `load_pair` is to load, by its arguments. Raises UsageError."""
    if name is not None and model is not None:
        raise UsageError("name either a pair or a model, not both (--pair or --model).")
    drafts = method is Method.auto or method.has_drafter
    if draft_model is not None and not method.takes_folder and method is not Method.plain:
        raise UsageError(f"--method {method.value} drafts without a drafter; leave --draft-model out.")
    given = parse_source(draft_model) if draft_model is not None and method.takes_folder else None
    if name is not None:
        spec = find_pair(name)
        return Choice(spec.name, spec.target, given or (spec.drafter if drafts else None), method)
    if model is None:
        raise UsageError("say what to load: a pair (--pair demo) or a model (--model TARGET --draft-model DRAFTER).")
    target = _target_source(model)
    if given is not None:
        return Choice(model, target, given, method)
    if not drafts:
        return Choice(model, target, None, method)
    try:
        match = pair_for_target(model)
    except UnknownTargetError as error:
        if method is not Method.auto:
            raise UsageError(f"{error} Give one with --draft-model, or run plainly with --no-draft.") from error
        return Choice(model, target, None, method)
    return Choice(model, target, match.pair.drafter, method, match.warning)


def _target_source(model: str) -> ModelSource:
    try:
        return parse_source(model)
    except UsageError:
        if pair_called(model) is not None:
            raise UsageError(f"{model} is a pair of target and drafter; load it with --pair {model}.") from None
        raise
