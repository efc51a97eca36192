"""The voice's rules hold, but for offences that ``tests/tidy.json`` allows, which only shrink."""

from __future__ import annotations

import json

import pytest

from tests.tidy import (
    ALLOWED,
    LOCALS,
    RULES,
    Kind,
    Text,
    allowed_counts,
    counts_of,
    grown,
    offences,
    offences_of,
    opening,
    rewritten,
    third_person,
)


def test_no_file_breaks_a_rule_more_often_than_allowed() -> None:
    lines = grown(offences(), allowed_counts())
    assert not lines, "see CONTRIBUTING.md, The voice:\n" + "\n".join(lines)


def test_the_list_names_rules_and_numbers_above_zero() -> None:
    for path, rules in allowed_counts().items():
        assert rules.keys() <= RULES.keys() and all(count > 0 for count in rules.values()), path
    assert list(allowed_counts()) == sorted(allowed_counts()), ALLOWED


FUNCTION = 'def work() -> None:\n    """{}"""\n'
CLASS = 'class Work:\n    """{}"""\n'
FIELD = 'WORK = 1\n"""{}"""\n'
PROPERTY = 'class A:\n    @property\n    def work(self) -> int:\n        """{}"""\n'
COMMENT = "work()  # {}\n"
MESSAGE = 'raise ValueError(f"{{work}}: {}")\n'
ALL_PROSE = (FUNCTION, CLASS, FIELD, PROPERTY, COMMENT, MESSAGE)
LONG = "Returns a word " + "and another word " * 8

PLANTED = [
    *(("verb", FUNCTION.format(t)) for t in ("Run a step.", "The steps.", "``work``", "Has work.")),
    *(("noun", form.format("What works.")) for form in (CLASS, FIELD, PROPERTY, '"""{}"""\n')),
    *(("noun", CLASS.format(f"{word} it is.")) for word in ("Whether", "Where", "How", "That")),
    *(("who", form.format("Returns work of nobody.")) for form in ALL_PROSE),
    *(("who", COMMENT.format(t)) for t in ("Whoever asks waits", "that which is", "for whom")),
    *(("fragment", form.format("Of a step.")) for form in (FUNCTION, CLASS, FIELD, PROPERTY)),
    *(("fragment", CLASS.format(f"{word} names.")) for word in ("By", "As", "Without", "From")),
    *(("long", form.format(LONG)) for form in (FUNCTION, CLASS, FIELD, PROPERTY)),
    *(("word", form.format("Gives up at once.")) for form in ALL_PROSE),
    *(("word", COMMENT.format(t)) for t in ("built anew", "is told so", "goes away", "hears it")),
    *(("local", f"{name} = 1\n") for name in sorted(LOCALS)),
    *(("local", t) for t in ("for own in x: pass\n", "with x as told: pass\n", "(said := 1)\n")),
]


@pytest.mark.parametrize(("rule", "source"), PLANTED)
def test_a_rule_sees_a_planted_offence(rule: str, source: str) -> None:
    assert rule in {offence.rule for offence in offences_of("planner/work.py", source)}


CLEAN = '''"""Schedules of a step, and their costs."""

LIMIT_S = 3.0
"""Seconds to wait for a worker. Default: no limit."""


class Work:
    """Bytes that a worker sends, and the ``whose`` of an example.

    A sentence ends at a full stop, so two short sentences are not a long sentence. This sentence
    and the sentence before have more than twenty-five words together.
    """

    own: int = 0
    """Bytes of the worker itself."""

    def carry(self, who: str) -> bool:
        """Carries work to a peer; :func:`nobody` is code.

        Raises:
            OSError: the peer has gone.
        """
        row = {"who": 1, "own": 2}  # dropped after a timeout
        return bool(row)

    @property
    def size(self) -> int:
        """Bytes sent. ``#`` in a literal is no comment: see the text below."""
        return len("""
            x = 1  # nobody
        """.replace("\\n", ""))
'''


def test_clean_text_has_no_offence() -> None:
    """The one match is the text in a string: a message of the product is prose."""
    offending = offences_of("planner/work.py", CLEAN)
    assert [(o.rule, o.line) for o in offending] == [("who", 29)]
    assert not offences_of("tests/test_work.py", CLEAN)


def test_docstrings_of_tests_need_no_verb() -> None:
    source = FUNCTION.format("The steps.")
    assert not offences_of("tests/test_work.py", source)
    assert offences_of("bench/work.py", source)


def test_an_offence_names_its_line_and_its_words() -> None:
    (offence,) = offences_of("planner/work.py", "x = 1\n" + FUNCTION.format("Run a step."))
    assert str(offence) == "planner/work.py:3: verb: Run a step."


def test_verbs_follow_morphology() -> None:
    forms = {"run": "runs", "carry": "carries", "obey": "obeys", "pass": "passes", "fix": "fixes"}
    forms |= {"catch": "catches", "do": "does", "go": "goes", "choose": "chooses"}
    assert {verb: third_person(verb) for verb in forms} == forms


def test_an_opening_ends_at_punctuation() -> None:
    text = Text(kind=Kind.FUNCTION, line=1, words="Waits, then runs.")
    assert opening(text) == "Waits"


THREE = "found = 1\nfound = 2\nsaid = 3\n"


def test_a_count_that_grew_fails_with_all_offences_of_the_file() -> None:
    of_file = {"a.py": offences_of("a.py", THREE)}
    assert not grown(of_file, {"a.py": {"local": 3}})
    assert not grown(of_file, {"a.py": {"local": 9}})
    lines = grown(of_file, {"a.py": {"local": 2}})
    assert lines == [
        "a.py: 3 offences against 'local', 2 are allowed:",
        "  a.py:1: local: found",
        "  a.py:2: local: found",
        "  a.py:3: local: said",
    ]
    assert grown(of_file, {}), "a file without an entry must be clean"


def test_a_rewrite_lowers_counts_and_follows_moved_files_but_raises_no_total() -> None:
    counts = counts_of({"new.py": offences_of("new.py", THREE), "clean.py": []})
    assert counts == {"new.py": {"local": 3}}
    text = rewritten(counts, {"old.py": {"local": 3, "who": 1}})
    assert json.loads(text) == counts
    with pytest.raises(ValueError, match="local: 2 -> 3"):
        rewritten(counts, {"new.py": {"local": 2}})
    with pytest.raises(ValueError, match="local: 0 -> 3"):
        rewritten(counts, {"new.py": {"who": 9}})
