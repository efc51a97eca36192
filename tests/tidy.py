"""The voice, counted: offences of docstrings, comments, messages and locals against the rules of
CONTRIBUTING.

``tests/tidy.json`` allows each file a number of offences against each rule. The numbers only
shrink: ``python -m tests.tidy --rewrite`` lowers them to today's, and refuses to write if the total
of a rule grew. Totals are compared, so a file may be moved, split or merged before.
``python -m tests.tidy PATH ...`` lists the offences of files or folders.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
PRODUCT = tuple(
    "chaos client config daemons deploy grafana host models planner protocol shm workers".split()
)
FOLDERS = (*PRODUCT, "bench", "tests")
ALLOWED = ROOT / "tests" / "tidy.json"

MAX_WORDS = 25
"""Words of a sentence."""


class Kind(Enum):
    """Kinds of text, by the place of the text in a file."""

    FUNCTION = auto()
    FIELD = auto()
    CLASS = auto()
    MODULE = auto()
    COMMENT = auto()
    MESSAGE = auto()
    LOCAL = auto()


DOCSTRINGS = frozenset({Kind.FUNCTION, Kind.FIELD, Kind.CLASS, Kind.MODULE})
PROSE = DOCSTRINGS | {Kind.COMMENT, Kind.MESSAGE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A docstring, comment, message or name of a local, and its place."""

    kind: Kind
    line: int
    words: str
    in_test: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offence:
    """A text that breaks a rule; ``words`` are the part that does."""

    rule: str
    path: str
    line: int
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.words}"


VERBS = """abandon accept act add address admit advance align allocate allow analyse announce
    answer append apply arrange ask assemble assert assign attach authenticate average await
    balance be begin belong bind block book borrow bound break bring broadcast build bundle cache
    calculate call cancel carry cast catch change charge check choose clamp classify clean clear
    clip clone close collapse collect combine commit compare compile complete compose compress
    compute concatenate configure confirm connect construct consume contain continue convert copy
    correct count cover create cut decide declare decode decompose decrease deduce defer define
    delay delete deliver demand deny depend derive describe deserialize detach detect determine
    die disable discard disconnect dispatch display distinguish distribute divide do download
    drain draw drive drop dump emit empty enable encode encrypt end enforce enlarge enqueue ensure
    enter enumerate equal erase estimate evaluate evict examine exchange exclude execute exit
    expand expect expire explain export express extend extract fail fence fetch fill filter find
    finish fit flatten flip flush fold follow forbid force forget fork format forward free freeze
    gather generate give go group grow guard guess halt hand handle hang hash have help hide hold
    ignore import include increase increment infer inform inherit initialize insert insist inspect
    install interpolate interrupt invalidate invert invoke issue iterate join judge keep kill know
    label launch lay lead leave lend let level lift limit link list listen load locate lock log
    look loop lower make map mark match measure meet mend merge migrate mirror modify move
    multiply name need normalize note notice notify number obey observe obtain occupy offer
    offload omit open order overlap override pack pad paint parse partition pass patch pause
    perform permit pick pin place plan plot poll pop populate post postpone predict prefetch
    prefer prepare prepend preserve prevent print probe process produce profile promise propagate
    protect prove provide publish pull push put query queue raise randomize rank react read
    rebuild recall receive recognize recompute reconnect record recover reduce refer refill
    refresh refuse regenerate register reject release reload remember remove rename render repair
    repeat replace replay reply report represent request require reserve reset resize resolve
    respond restart restore restrict resume retry return reuse reverse revert rewrite roll rotate
    round route run sample satisfy save say scale scan scatter schedule score scrape search seek
    select send separate serialize serve set settle shape share shift shorten show shrink shuffle
    shut signal simplify simulate skip sleep slice solve sort spawn speak specify spend split
    spread stamp stand start state stay step stop store stream strike strip submit subscribe
    substitute subtract succeed suggest sum supervise supply support suppose suspend swap sweep
    switch synchronize take tally tell terminate test throw tie time touch trace track train
    transfer transform translate transpose trigger trim truncate try turn undo unlink unlock unmap
    unpack unpin unregister unwrap update upload use validate verify visit wait wake walk want
    warm warn watch weigh widen withdraw wrap write yield inject mount silence"""
"""Verbs that a function's docstring may open with, in their base form."""


def third_person(verb: str) -> str:
    """Returns a verb's form after he, she or it: ``carries`` for ``carry``."""
    if irregular := {"be": "is", "have": "has", "do": "does", "go": "goes"}.get(verb):
        return irregular
    if re.search("[^aeiou]y$", verb):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if re.search("(s|x|z|ch|sh)$", verb) else f"{verb}s"


OPENINGS = frozenset(third_person(verb).capitalize() for verb in VERBS.split()) - {"Is", "Has"}


def opening(text: Text) -> str:
    """Returns the first word, without the punctuation after it."""
    word = re.match(r"[\w'/-]+", text.words)
    return word[0] if word else text.words[:1]


def start(text: Text) -> str:
    """Returns the first words: an offence shows them."""
    return " ".join(text.words.split()[:8])


QUESTIONS = frozenset("What Whether Who Where Whom Whose How That Which Whoever Whatever".split())
FRAGMENTS = frozenset("Of By As With Without In For From To Behind Beside".split())


def verb_first(text: Text) -> list[str]:
    """Rule 1: a function's docstring opens with a verb in the third person."""
    if text.kind != Kind.FUNCTION or text.in_test or opening(text) in OPENINGS:
        return []
    return [start(text)]


def noun_first(text: Text) -> list[str]:
    """Rule 1: the docstring of a class, a module or a field opens with no question."""
    asks = text.kind in DOCSTRINGS - {Kind.FUNCTION} and opening(text) in QUESTIONS
    return [start(text)] if asks else []


def no_fragment(text: Text) -> list[str]:
    """Rule 3: no docstring opens with a preposition."""
    headless = text.kind in DOCSTRINGS and opening(text) in FRAGMENTS
    return [start(text)] if headless else []


def matches(pattern: str) -> Callable[[Text], list[str]]:
    """Makes a rule: prose has no match of a pattern."""
    words = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)

    def rule(text: Text) -> list[str]:
        if text.kind not in PROSE:
            return []
        prose = re.sub(r"\s+", " ", plain(text.words))
        return [prose[max(0, m.start() - 20) : m.end() + 20] for m in words.finditer(prose)]

    return rule


def plain(words: str) -> str:
    """Returns text without code: literals, roles and lines of examples."""
    words = re.sub(r"``.*?``|:\w+:`.*?`|`.*?`", "X", words, flags=re.DOTALL)
    return re.sub(r"^ *>>>.*$", "", words, flags=re.MULTILINE)


no_who = matches("who|whoever|whose|whom|whomever|nobody|somebody|whatever|that which")
"""Rule 2: an actor has a name."""

field_words = matches(
    "gets? on|got on|gives? up|gave up|giving up|lets? go|go(?:es)? away|went away|gone away|anew"
    "|beside|looks?|looked|looking|hears?|heard|hearing|(?:is|are|was|were|be|been) (?:told|said)"
)
"""Rule 6: the field's words (wait, drop, reject, release, check) instead of a story's."""

LOCALS = frozenset("found said told asked wanted there own".split())


def local_nouns(text: Text) -> list[str]:
    """Rule 7: a local is a noun of the value it holds."""
    return [text.words] if text.kind == Kind.LOCAL and text.words in LOCALS else []


def short_sentences(text: Text) -> list[str]:
    """Rule 5: a sentence of a docstring has at most :data:`MAX_WORDS` words."""
    if text.kind not in DOCSTRINGS:
        return []
    paragraphs = re.split(r"\n\s*\n|\n\s*[*-] |::\s*\n", plain(text.words))
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", p)]
    counts = [(len(re.findall(r"[\w'/-]+", sentence)), sentence) for sentence in sentences]
    return [f"{count} words: {' '.join(s.split()[:8])}" for count, s in counts if count > MAX_WORDS]


RULES: Mapping[str, Callable[[Text], list[str]]] = {
    "verb": verb_first,
    "noun": noun_first,
    "who": no_who,
    "fragment": no_fragment,
    "long": short_sentences,
    "word": field_words,
    "local": local_nouns,
}
"""Rules by the name that the allow-list gives them."""


Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(source: str, *, in_test: bool = False) -> Iterator[Text]:
    """Yields all texts of a Python file that rules read. Messages of tests are data, and are left
    out.
    """
    seen: set[int] = set()
    multiline: set[int] = set()
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                multiline.update(range(node.lineno, node.end_lineno or node.lineno))
                if not in_test and id(node) not in seen and " " in node.value:
                    yield Text(kind=Kind.MESSAGE, line=node.lineno, words=node.value)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and id(node) not in seen:
                yield Text(kind=Kind.LOCAL, line=node.lineno, words=node.id)
        elif isinstance(node, Documented):
            for expression, kind in documentation(node):
                seen.add(id(expression))
                words = str(expression.value).strip()
                yield Text(kind=kind, line=expression.lineno, words=words, in_test=in_test)
            if isinstance(node, ast.ClassDef):
                seen |= {id(target) for target in targets(node)}
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|  )# (.*)", line) if "# " in line else None
        if comment and number not in multiline:
            yield Text(kind=Kind.COMMENT, line=number, words=comment[1])


def nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields all nodes, each before its children. ``ast.walk`` takes three times as long."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name)
            if type(value) is list:
                stack += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and type(value) is not ast.Load:
                stack.append(value)


def documentation(node: Documented) -> Iterator[tuple[ast.Constant, Kind]]:
    """Yields the docstring of a node and those below its fields."""
    for index, statement in enumerate(node.body):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text, Kind.FIELD if index else kind_of(node)


def kind_of(node: Documented) -> Kind:
    """Returns the kind of a node's docstring. A property reads like a field."""
    if isinstance(node, (ast.Module, ast.ClassDef)):
        return Kind.MODULE if isinstance(node, ast.Module) else Kind.CLASS
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return Kind.FIELD if decorators & {"property", "cached_property"} else Kind.FUNCTION


def targets(node: ast.ClassDef) -> Iterator[ast.expr]:
    """Yields the fields that a class's body assigns."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            yield statement.target
        elif isinstance(statement, ast.Assign):
            yield from statement.targets


def offences_of(path: str, source: str) -> list[Offence]:
    """Returns a file's offences in the order of its lines."""
    all_texts = texts(source, in_test=path.startswith("tests/"))
    offences = [
        Offence(rule=name, path=path, line=text.line, words=words)
        for text in all_texts
        for name, rule in RULES.items()
        if text.kind != Kind.LOCAL or name == "local"
        for words in rule(text)
    ]
    return sorted(offences, key=lambda offence: offence.line)


def files(folders: tuple[str, ...] = FOLDERS) -> Iterator[Path]:
    """Yields the Python files below folders, without generated ones."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "generated" not in path.parts:
                yield path


@cache
def offences() -> Mapping[str, list[Offence]]:
    """Returns the offences of each file of product and tests, by its path."""
    paths = {path.relative_to(ROOT).as_posix(): path for path in files()}
    return {name: offences_of(name, p.read_text(encoding="utf-8")) for name, p in paths.items()}


Counts: TypeAlias = Mapping[str, Mapping[str, int]]
"""Numbers of offences by path and rule."""


def counts_of(offences: Mapping[str, list[Offence]]) -> Counts:
    """Counts offences; a clean file has no entry."""
    return {
        path: dict(sorted(Counter(offence.rule for offence in of_file).items()))
        for path, of_file in offences.items()
        if of_file
    }


def grown(offences: Mapping[str, list[Offence]], allowed: Counts) -> list[str]:
    """Returns a line for each offence against a rule that its file breaks more often than allowed,
    below a line with both numbers.
    """
    lines = []
    for path, rules in counts_of(offences).items():
        for rule, count in rules.items():
            limit = allowed.get(path, {}).get(rule, 0)
            if count > limit:
                lines.append(f"{path}: {count} offences against {rule!r}, {limit} are allowed:")
                lines += [f"  {offence}" for offence in offences[path] if offence.rule == rule]
    return lines


def totals(counts: Counts) -> Counter[str]:
    """Adds the counts of all files for each rule."""
    total: Counter[str] = Counter()
    for rules in counts.values():
        total.update(rules)
    return total


def rewritten(counts: Counts, allowed: Counts) -> str:
    """Returns the text of the list with today's counts.

    Raises:
        ValueError: the total of a rule grew.
    """
    now, limits = totals(counts), totals(allowed)
    rose = [f"{rule}: {limits[rule]} -> {now[rule]}" for rule in RULES if now[rule] > limits[rule]]
    if rose:
        raise ValueError(f"totals may only shrink: {', '.join(rose)}")
    rows = (f"  {json.dumps(path)}: {json.dumps(counts[path])}" for path in sorted(counts))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def allowed_counts() -> Counts:
    """Reads the allow-list."""
    counts: Counts = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return counts


def main() -> None:
    """Runs ``python -m tests.tidy``."""
    parser = argparse.ArgumentParser(prog="python -m tests.tidy", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders whose offences are listed")
    parser.add_argument("--rewrite", action="store_true", help="lower the allowed numbers")
    options = parser.parse_args()
    if options.rewrite:
        try:
            text = rewritten(counts_of(offences()), allowed_counts())
        except ValueError as error:
            sys.exit(f"{error}\n" + "\n".join(grown(offences(), allowed_counts())))
        ALLOWED.write_text(text, encoding="utf-8")
    for path, of_file in offences().items():
        if any(path == name or path.startswith(f"{name.rstrip('/')}/") for name in options.paths):
            sys.stdout.writelines(f"{offence}\n" for offence in of_file)
    total = totals(counts_of(offences()))
    sys.stdout.write("".join(f"{rule}: {total[rule]}\n" for rule in RULES))


if __name__ == "__main__":
    main()
