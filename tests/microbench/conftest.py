# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from compared import COMMITTED, Gate, Run, cases

from microbench.compare.__main__ import main


@pytest.fixture
def committed() -> Run:
    """The committed run, with nothing undecided in the config `noop`."""
    document = json.loads(COMMITTED.read_text())
    noop = document["configs"]["noop"]
    noop |= {"verdict": "flat", "verdict_of": dict.fromkeys(noop["verdict_of"], "flat")}
    return document


@pytest.fixture
def gate(tmp_path, capsys):
    def compare(old: Run, new: Run, limits: str = "") -> Gate:
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, document in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps(document))
        toml, junit = tmp_path / "limits.toml", tmp_path / "junit.xml"
        toml.write_text(limits)
        junit.unlink(missing_ok=True)
        status = main([*map(str, paths), "--limits", str(toml), "--junit", str(junit)])
        said = capsys.readouterr()
        return Gate(status, said.out, said.err, cases(junit))

    return compare
