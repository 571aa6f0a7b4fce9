"""The examples of docs/reuse.md: each complete in itself, short, and run as it stands.

What an example promises is asserted by its own last lines.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reuse.md").read_text()
BLOCKS = re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_there_are_five_examples_and_the_readme_leads_to_them():
    assert len(BLOCKS) == TEXT.count("```python") == 5
    assert "docs/reuse.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_an_example_runs_and_is_short(title, code, monkeypatch):
    assert len(code.splitlines()) <= 30
    assert max(map(len, code.splitlines())) <= 100
    assert "assert " in code
    monkeypatch.chdir(ROOT)
    exec(compile(code, title, "exec"), {"__name__": "__main__"})
