"""Flags made from the configuration classes, and the forms in which they may be typed.

- dashes and underscores are the same;
- booleans have a ``--no-`` form;
- JSON flags may be given whole or in parts: ``--hf-overrides.a.b 3``, ``--x.list+ v``;
- sizes may be human: ``1k`` is 1000, ``1K`` is 1024, fractions only with the decimal letters;
- ``--config FILE.yaml`` holds long flag names; the command line wins over it;
- ``--help=all``, ``--help=<group>``, ``--help=<flag>`` show parts of the help.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NoReturn, Union

from headrace.demo import DEMOS, path
from headrace.suggestions import near_names
from headrace.unsupported_flags import unbuilt

_POSITIONAL = "model_tag"
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """``"4096"``, ``"1k"`` (1000), ``"1K"`` (1024), ``"25.6k"`` (25600).

    Raises:
        argparse.ArgumentTypeError: anything else, also fractions of binary sizes.
    """
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 4096, 4k (4000) or 4K (4096)"
        )
    number, letter = match.groups()
    if "." in number and letter not in _DECIMAL:
        raise argparse.ArgumentTypeError(
            f"{text!r}: fractions need a decimal letter (k, m, g, t), not {letter or 'none'!r}"
        )
    try:
        value = Decimal(number) * (_DECIMAL.get(letter) or _BINARY.get(letter) or 1)
    except InvalidOperation as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size") from error
    if value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        argparse.ArgumentTypeError: not JSON, or not an object; says where.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.500} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


class _HelpPart(argparse.Action):
    """``--help`` and ``--help=<word>``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        parser.print_part(values)
        parser.exit()


class _Collect(argparse.Action):
    """``--x a b --x c`` -> [a, b, c]; the first use replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        known = getattr(namespace, self.dest)
        before = known if isinstance(known, list) else []
        setattr(namespace, self.dest, [*before, *values])


class _CollectJson(_Collect):
    """As :class:`_Collect`; a word that begins with ``[`` is a JSON list of texts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flat: list[str] = []
        for word in values:
            flat += _json_texts(parser, word, option_string) if word.startswith("[") else [word]
        super().__call__(parser, namespace, flat, option_string)


def _json_texts(parser: argparse.ArgumentParser, word: str, flag: str | None) -> list[str]:
    try:
        found = json.loads(word)
    except (ValueError, RecursionError) as error:
        parser.error(f"argument {flag}: {word!r:.500} is not valid JSON: {error}")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        parser.error(f"argument {flag}: {word!r} must be a JSON list of texts")
    return found


class Parser(argparse.ArgumentParser):
    """An argument parser that reads all the forms of this module's docstring."""

    def __init__(self, **kwargs: Any) -> None:
        self._json_flags: dict[str, str] = {}
        self._groups_by_name: dict[str, argparse._ArgumentGroup] = {}
        self._takes_model = False
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(add_help=False, allow_abbrev=False, **kwargs)
        self.add_argument(
            "-h", "--help", nargs="?", action=_HelpPart, metavar="WORD",
            help="Show this help; =all, =<group> or =<flag> shows more.",
        )  # fmt: skip

    def add_model(self, kinds: str = "folder or hub name") -> None:
        """Add ``MODEL`` as a positional, which wins over ``--model``, and ``--config``.

        Args:
            kinds: the forms of ``MODEL``, for the help.
        """
        self.add_argument(_POSITIONAL, nargs="?", metavar="MODEL", help=kinds)
        self.add_argument(
            "--config", metavar="FILE", help="YAML file of flags; the command line wins"
        )
        self.add_argument(
            "--demo", choices=list(DEMOS), help="a model that comes with headrace, instead of MODEL"
        )
        self._takes_model = True

    def add_config(self, config: type, title: str, only: Collection[str] | None = None) -> None:
        """Add a flag for every option of a configuration class, in a group named ``title``.

        Args:
            only: names of the options wanted, None for all.
        """
        group = self.add_argument_group(title, (config.__doc__ or "").strip().split("\n")[0])
        self._groups_by_name[title.lower()] = group
        hints = typing.get_type_hints(config)
        for option in options_of(config):
            if only is None or option.name in only:
                self._add_option(group, option, hints[option.name])

    def add_json_config(self, config: type, flag: str, title: str) -> None:
        """Add one JSON flag for a whole configuration class, ``--flag '{"x": 1}'`` or
        ``--flag.x 1``, in a group named ``title``."""
        text = (config.__doc__ or "").strip().split("\n")[0]
        lines = [
            f"  .{option.name:<30} {option.metadata['help']} (default: {default_of(option)!r})"
            for option in options_of(config)
        ]
        group = self.add_argument_group(title, "\n".join([text, "", *lines]))
        self._groups_by_name[title.lower()] = group
        self._json_flags["--" + flag.replace("_", "-")] = flag
        group.add_argument(
            "--" + flag.replace("_", "-"), dest=flag, type=json_object, metavar="JSON", default={},
            help=f"JSON object with the keys above; or --{flag.replace('_', '-')}.KEY VALUE.",
        )  # fmt: skip

    def _add_option(
        self, group: argparse._ArgumentGroup, option: dataclasses.Field[Any], hint: Any
    ) -> None:
        name = flag_name(option)
        text = option.metadata["help"]
        if option.metadata["cost"]:
            text += f" Costs: {option.metadata['cost']}."
        kwargs: dict[str, Any] = {"dest": name, "default": default_of(option)}
        kwargs["help"] = (text + f" (default: {kwargs['default']!r})").replace("%", "%%")
        kind = _plain(hint)
        if kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            kwargs["choices"] = typing.get_args(kind)
        elif _is_mapping(kind):
            kwargs |= {"type": json_object, "metavar": "JSON"}
            for flag in filter(
                None, ("--" + name.replace("_", "-"), option.metadata["other_flag"])
            ):
                self._json_flags[flag] = name
        elif typing.get_origin(kind) in (tuple, list):
            item = typing.get_args(kind)[0]
            kwargs |= {"nargs": "+", "type": str if item is Any else item, "action": _Collect}
            if option.metadata.get("json_list"):
                kwargs["action"] = _CollectJson
        elif kind is int and option.metadata["human_int"]:
            kwargs |= {"type": human_int, "metavar": "SIZE"}
        else:
            kwargs["type"] = kind
        flags = ["--" + name.replace("_", "-"), option.metadata.get("other_flag")]
        # A command's own short flag comes first: -q asks one question in `headrace chat`.
        free = [flag for flag in flags if flag and flag not in self._option_string_actions]
        group.add_argument(*free, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        try:
            argv = self._with_config_file([_dashed(word) for word in argv])
            argv = list(_joined_json(argv, self._json_flags))
        except (OSError, ValueError) as error:
            self.error(str(error))
        parsed = super().parse_args(argv, namespace)
        self._refuse_swallowed(parsed)
        if self._takes_model:
            self._choose_model(parsed)
        return parsed

    def _choose_model(self, parsed: argparse.Namespace) -> None:
        if getattr(parsed, _POSITIONAL) is not None:
            parsed.model = getattr(parsed, _POSITIONAL)
        if parsed.demo is None:
            return
        if parsed.model is not None:
            self.error(f"argument --demo: cannot be given together with the model {parsed.model!r}")
        parsed.model = str(path(parsed.demo))
        parsed.served_model_name = parsed.served_model_name or [DEMOS[parsed.demo].name]

    def _refuse_swallowed(self, parsed: argparse.Namespace) -> None:
        """argparse takes an unknown ``--flag=VALUE`` for a positional if the value has a space."""
        for action in self._actions:
            value = None if action.option_strings else getattr(parsed, action.dest, None)
            if isinstance(value, str) and re.match(r"--[A-Za-z][\w-]*=", value):
                self.error(f"unrecognized arguments: {value}")

    def error(self, message: str) -> NoReturn:
        """Say in two lines what is wrong and where help is, and exit with status 2; an unknown flag
        gets the nearest known ones."""
        match = re.search(r"unrecognized arguments: (-[\w.-]+)", message)
        refusal = unbuilt(match.group(1)) if match else None
        if refusal is not None:
            message = refusal
        elif match:
            known = [flag for action in self._actions for flag in action.option_strings]
            near = near_names(match.group(1), known)
            message += f". Did you mean {' or '.join(near)}?" if near else ""
        flag = re.match(r"argument (?:-\w+/)?--([\w-]+)", message)
        where = (
            f"--help={flag.group(1)} says what it takes" if flag else "--help=all lists the flags"
        )
        print(f"hint: {self.prog} {where} (docs/errors/HR-CFG-002.md)", file=sys.stderr)
        self.exit(2, f"{self.prog}: HR-CFG-002: {' '.join(message.split())}\n")

    def _with_config_file(self, argv: list[str]) -> list[str]:
        """Put the file's flags before the command line's, which then win."""
        for index, word in enumerate(argv):
            if word == "--config" and index + 1 < len(argv):
                name, rest = argv[index + 1], argv[:index] + argv[index + 2 :]
                break
            if word.startswith("--config="):
                name, rest = word.split("=", 1)[1], argv[:index] + argv[index + 1 :]
                break
        else:
            return argv
        has_positional = bool(rest) and not rest[0].startswith("-")
        from_file = _flags_of_file(Path(name), skip_model=has_positional)
        return [*rest[:1], *from_file, *rest[1:]] if has_positional else [*from_file, *rest]

    def print_part(self, word: str | None) -> None:
        """Print short help (None), ``all``, one group, or the flags that contain ``word``."""
        if word is None:
            self._print_short()
        elif word.lower() == "all":
            self.print_help()
        elif word.lower() in self._groups_by_name:
            self._print_groups([self._groups_by_name[word.lower()]])
        else:
            self._print_matching(word)

    def _print_short(self) -> None:
        own = [group for group in self._action_groups if group not in self._groups_by_name.values()]
        formatter = self._get_formatter()
        positionals = [f"[{a.metavar or a.dest}]" for a in self._actions if not a.option_strings]
        formatter.add_usage(" ".join(["%(prog)s", *positionals, "[flags]"]), [], [])
        formatter.add_text(self.description)
        print(formatter.format_help())
        self._print_groups(own)
        if self._groups_by_name:
            names = ", ".join(self._groups_by_name)
            print(f"More flags: --help=all, --help=<flag>, or --help=<group>. Groups: {names}")
        if self.epilog:
            print(self.epilog)

    def _print_groups(self, groups: Sequence[argparse._ArgumentGroup]) -> None:
        formatter = self._get_formatter()
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        print(formatter.format_help())

    def _print_matching(self, word: str) -> None:
        wanted = word.lower().lstrip("-").replace("_", "-")
        found = [a for a in self._actions if any(wanted in f for f in a.option_strings)]
        if not found:
            groups = ", ".join(self._groups_by_name)
            self.error(
                f"--help={word}: no flag contains {word!r}, and no group is named so ({groups})"
            )
        formatter = self._get_formatter()
        formatter.add_arguments(found)
        print(formatter.format_help())


def options_of(config: type) -> Iterator[dataclasses.Field[Any]]:
    """The fields of a configuration class that were made with ``option``."""
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            yield field


def flag_name(option: dataclasses.Field[Any]) -> str:
    """The flag's name with underscores."""
    return str(option.metadata["flag"] or option.name)


def default_of(option: dataclasses.Field[Any]) -> Any:
    """The option's default value."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def kind_of(hint: Any) -> Any:
    """The type of an option's values besides None; ``Mapping`` of all mappings."""
    kind = _plain(hint)
    return Mapping if _is_mapping(kind) else kind


def takes_more(hint: Any) -> bool:
    """True if an option has, from Python, values of further types: its class checks them."""
    return _is_union(hint) and Any in typing.get_args(hint)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _plain(hint: Any) -> Any:
    """``X | None`` -> X, and so ``X | Any``, whose further values no flag can say."""
    if _is_union(hint):
        rest = [arg for arg in typing.get_args(hint) if arg not in (type(None), Any)]
        return rest[0] if len(rest) == 1 else str
    return hint


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _dashed(word: str) -> str:
    """``--max_num_seqs=3`` -> ``--max-num-seqs=3``; keys after a dot and values are left alone."""
    match = re.match(r"--[A-Za-z0-9_-]+", word)
    if match is None:
        return word
    return match.group().replace("_", "-") + word[match.end() :]


def _joined_json(argv: Sequence[str], json_flags: Mapping[str, str]) -> Iterator[str]:
    """Collect ``--x.a 1 --x.b.c 2 --x.l+ v`` into one ``--x={...}``, after everything else."""
    collected: dict[str, dict[str, Any]] = {}
    pending = iter(argv)
    for word in pending:
        match = re.match(r"(--[A-Za-z0-9-]+)\.([\w.-]+?)(\+?)(?:=(.*))?$", word, re.DOTALL)
        if match is None or match.group(1) not in json_flags:
            yield word
            continue
        flag, path, plus, text = match.groups()
        if text is None:
            text = next(pending, None)
            if text is None:
                raise ValueError(f"{word}: a value is missing")
        _store(collected.setdefault(flag, {}), path.split("."), text, append=bool(plus))
    for flag, value in collected.items():
        yield f"{flag}={json.dumps(value)}"


def _store(target: dict[str, Any], path: Sequence[str], text: str, *, append: bool) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
    if append:
        target.setdefault(path[-1], []).extend(_scalar(part) for part in text.split(","))
    else:
        target[path[-1]] = _scalar(text)


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _flags_of_file(path: Path, *, skip_model: bool) -> list[str]:
    """The command-line words that a YAML file stands for.

    Raises:
        ValueError: not a .yaml or .yml file, or not a mapping of flag names.
        OSError: it cannot be read.
    """
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--config {path}: must be a .yaml or .yml file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold a mapping of flag names to values")
    content = {
        key: value
        for key, value in content.items()
        if not (skip_model and str(key).replace("_", "-") == "model")
    }
    return argv_of(content)


def argv_of(settings: Mapping[Any, Any]) -> list[str]:
    """The command-line words that settings by their flags' names stand for."""
    argv: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list):
            argv += [flag, *map(_word_of, value)]
        elif isinstance(value, dict):
            argv.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            argv.append(f"{flag}={value}")
    return argv


def _word_of(item: Any) -> str:
    """An item of a list, as it would be typed."""
    return json.dumps(item) if isinstance(item, dict) else str(item)
