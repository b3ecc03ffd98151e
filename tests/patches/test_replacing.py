"""The list of changes to fairseq, and the page that is printed from it."""

from __future__ import annotations

import inspect
import sys

from support import fairseq_tests
from support.commands import ROOT

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches import CHANGES, apply
from fw_fairseq.patches.__main__ import page
from fw_fairseq.patches.replacing import CHANGES as REGISTERED
from fw_fairseq.patches.replacing import replaces


def test_the_page_is_up_to_date():
    """Printed by ``python -m fw_fairseq.patches > docs/fairseq_changes.md``."""
    assert (ROOT / "docs" / "fairseq_changes.md").read_text() == page()


def test_every_change_is_explained():
    for change in CHANGES:
        words = inspect.getdoc(change.function) or ""
        assert "now " in words.lower().split("\n\n")[0].replace("\n", " "), change.place
        assert f"`{change.place}`" in page()
    assert len({change.place for change in CHANGES}) == len(CHANGES) > 20


def test_every_change_is_applied_once():
    apply()  # fairseq's commands may have been imported since
    before = [current(change.place) for change in CHANGES]
    apply()
    assert [current(change.place) for change in CHANGES] == before


def current(place: str):
    """What ``module.name`` or ``module.Class.name`` is."""
    module = next((name for name in heads(place) if name in sys.modules), None)
    found = sys.modules[module] if module else None
    for name in place[len(module or "") + 1 :].split("."):
        found = getattr(found, name, None)
    return found


def heads(place: str) -> list[str]:
    parts = place.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]


class Owner:
    def method(self, x):
        return x + 1


def test_a_replacement_gets_the_original(monkeypatch):
    monkeypatch.setattr(Owner, "method", Owner.method)
    before = len(REGISTERED)

    @replaces(Owner, "method")
    def double(original, owner, x):
        return 2 * original(owner, x)

    change = REGISTERED.pop()
    assert len(REGISTERED) == before and change.place == f"{__name__}.Owner.method" and Owner().method(1) == 2
    change.apply()
    change.apply()
    assert Owner().method(1) == 4 and Owner.method.changed_by is double


def test_a_test_of_fairseq_that_fails_with_the_changes_is_found(tmp_path):
    """From pytest's reports, which name each test."""

    def report(**failing: bool) -> dict[str, str]:
        cases = [f'<testcase classname="a.B" name="{name}">{"<failure/>" * failed}</testcase>' for name, failed in failing.items()]
        cases.append('<testcase classname="a" name="s"><skipped/></testcase>')
        (tmp_path / "a.xml").write_text(f"<testsuites>{''.join(cases)}</testsuites>")
        return fairseq_tests.outcomes(tmp_path / "a.xml")

    without, changed = report(lost=False, won=True, never=True), report(lost=True, won=False, never=True)
    assert fairseq_tests.lost(without, changed) == ["a.B::lost"] and fairseq_tests.lost(changed, without) == ["a.B::won"]
    assert fairseq_tests.counts(without) == "1 passed, 2 failed, 1 skipped" and fairseq_tests.lost(without, without) == []
