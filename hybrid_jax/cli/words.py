"""Messages of the library in the words of a shell: options with dashes, and no Python."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import typer

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.other_names import nearest, other_names

# The library's name for what an option of another name sets.
OTHER_NAMES = {
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.choice": "choice",
    "sources": "source",
    "policy": "cache",
}
# Tables of names elsewhere, and an option of the commands that they are for.
PLACES = {"LLM": "memory", "SamplingParams": "temperature"}
ENGINE_FIELDS = frozenset(field.name for field in fields(EngineConfig))
CLASS = r"\b(?:LLM|(?:[A-Z][a-z]+){2,})\b"
# "LLM: ", "SamplingParams: ", "load_model: ": the part of the library that found it, which means nothing in a shell.
FINDER = re.compile(rf"^({CLASS}|[a-z]+(?:_[a-z]+)+|distill): ")
AFTER_FILE = re.compile(rf"(?<=\.json: ){CLASS}: ")
# After the name of a file, names are those of the file's content: "DIR/generation_config.json: top_k must be ...".
OF_A_FILE = re.compile(r"^.+?\.json: ")
VERBS = "change|give|lower|pass|raise|set|use"
QUOTED = r"'[^']*'|\"[^\"]*\""


def flags_of(app: typer.Typer, arguments: list[str]) -> dict[str, str]:
    """The options of the command that the arguments call; none if they call no command.

    Returns:
        From the library's name of each to what is typed: {"max_rows": "--max-rows"}.
    """
    name = next((word for word in arguments if not word.startswith("-")), "")
    command = typer.main.get_group(app).commands.get(name)
    return {} if command is None else flags_of_command(command)


def flags_of_command(command: Any) -> dict[str, str]:
    """`flags_of` for one command."""
    params = command.params
    flags = {str(param.name): param.opts[0] for param in params if param.opts[0].startswith("-")}
    return flags | {other: flags[name] for other, name in OTHER_NAMES.items() if name in flags}


def hint(option: str, flags: dict[str, str], command: str) -> str:
    """What to do about an option that a command does not have.

    Example:
        >>> hint("--ctx-size-limit", {"max_rows": "--max-rows"}, "hybrid-jax chat")
        'see hybrid-jax chat --help'
        >>> hint("--max-num-seqs", {"memory": "--memory", "max_rows": "--max-rows"}, "hybrid-jax chat")
        'did you mean --max-rows?'
    """
    name = option.lstrip("-").replace("-", "_")
    for where, own in PLACES.items():
        if own not in flags:
            continue
        tables = other_names(where)
        if feature := tables["later"].get(name):
            return f"{feature} is not built yet; leave it out"
        if reason := tables["needless"].get(name):
            return f"{reason}; leave it out"
        meant, space, more = tables["ours"].get(name, "").partition(" ")
        if meant in flags:
            return f"did you mean {flags[meant]}{'' if 'Config' in more else space + more}?"
    if near := nearest(name, flags):
        return f"did you mean {flags[near]}?"
    if PLACES["LLM"] in flags and name in ENGINE_FIELDS:
        return "only the Python interface has it; leave it out"
    return f"see {command} --help"


def shell_words(message: str, flags: dict[str, str]) -> str:
    """A message of the library, reworded for a command. Values in quotes and paths stay as they are.

    Example:
        >>> flags = {"dtype": "--dtype", "max_rows": "--max-rows"}
        >>> shell_words("LLM: max_rows=9 needs 5 GiB; use dtype='bfloat16' or lower max_rows", flags)
        '--max-rows 9 needs 5 GiB; use --dtype bfloat16 or lower --max-rows'
        >>> shell_words("EngineConfig: dtype must be None or text, got 'max_rows'", flags)
        "--dtype must be text, got 'max_rows'"
    """
    text = message
    while (found := FINDER.match(text)) and found[1] not in flags:
        text = text[found.end() :]
    text = AFTER_FILE.sub("", text)
    if not flags or OF_A_FILE.match(text):
        return text
    return _pattern(flags).sub(lambda found: _translated(found, flags), text)


def _pattern(flags: dict[str, str]) -> re.Pattern[str]:
    """Matches what needs other words. What only looks like that is matched first, by rules of its own."""
    names = [re.escape(name) for name in sorted(flags, key=len, reverse=True)]
    name = rf"(?:{'|'.join(names)})(?![\w=])"
    # A name with an underscore or a dot can only be an option; other names are also plain words.
    sure = [name for name in names if not name.isalpha()]
    rules = {
        "keyword": rf"\b(?P<key>{'|'.join(names)})=(?P<value>{QUOTED}|[^\s,;()]+)",
        "bytes": r"'utf-8' codec can't decode byte (?P<byte>0x\w\w) in position (?P<place>\d+): [\w ]+",
        "list": rf"(?<=got )\((?:{QUOTED})(?:, (?:{QUOTED}))*,?\)",
        "quoted": rf"(?<!\w)(?:{QUOTED})(?!\w)",
        "path": r"\S*/\S*",
        "nothing": rf"\bNone or |,? or None\b|,? or (?:an? )?{CLASS}| \(b(?:{QUOTED})\)",
        "subject": rf"^(?:[a-z][a-z-]*: )?{name}(?=:| must\b| of\b| needs?\b)",
        "remedy": rf"\b(?:{VERBS}) {name}(?:(?:, | or | and ){name})*",
        "option": rf"(?<![\w.-])(?:{'|'.join(sure)})(?![\w=]|\.\w)",
    }
    return re.compile("|".join(f"(?P<{rule}>{pattern})" for rule, pattern in rules.items()))


def _translated(found: re.Match[str], flags: dict[str, str]) -> str:
    match found.lastgroup:
        case "keyword":
            key, value = found["key"], found["value"].strip("'\"")
            if value == "True":
                return flags[key]
            if value == "False":
                return f"--no-{flags[key].removeprefix('--')}"
            return f"{flags[key]} {value}"
        case "bytes":
            return f"it has byte {found['byte']} at byte {found['place']}, which is not UTF-8"
        case "list":
            return found[0].strip("(,)")
        case "nothing":
            return ""
        case "subject" | "remedy" | "option":
            return re.sub(r"[\w.]+", lambda word: flags.get(word[0], word[0]), found[0])
    return found[0]
