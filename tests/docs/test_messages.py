"""docs/messages.md is what the wire's grammar has today, without a field left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from write_messages import GRAMMAR, PAGE, reference  # noqa: E402

from protofleet.contract.accuracy import Accuracy  # noqa: E402
from protofleet.contract.wire.fields import table_of  # noqa: E402
from protofleet.contract.wire.messages import Announcement, Contribution, Status  # noqa: E402


def test_the_page_is_what_the_grammar_says_today() -> None:
    assert PAGE.read_text() == reference(), "run: python docs/write_messages.py"


def test_each_field_of_the_grammar_has_a_row() -> None:
    lines = re.findall(r"^ +(?:\? )?\d+: .+;", GRAMMAR.read_text(), re.MULTILINE)
    assert len(lines) == len(re.findall(r"^\| \d+", PAGE.read_text(), re.MULTILINE)) > 100


def test_each_figure_of_accuracy_has_its_entry() -> None:
    section = PAGE.read_text().split("## Figures of accuracy\n")[1].split("\n## ")[0]
    sent = Accuracy(**dict.fromkeys(Accuracy.__dataclass_fields__, 1)).metrics(bytes(4), 1)
    assert set(re.findall(r"`(accuracy_\w+)`", section)) == set(sent)


def test_a_row_says_the_key_and_whether_the_field_may_be_left_out() -> None:
    for message, title in ((Announcement, "announcement, 1"), (Contribution, "contribution, 3"), (Status, "status, 6")):
        section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
        rows = {int(key): bool(may) for key, may in re.findall(r"^\| (\d+)( \?)? \|", section, re.MULTILINE)}
        assert rows == {slot.key: slot.optional for slot in table_of(message).slots if slot.key is not None}
