# SPDX-License-Identifier: Apache-2.0
"""A stopped run keeps each finished cell, also of a vLLM that nobody lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtax.axes import matrix
from kvtax.axes.matrix import Choice, measure_matrix, read_all_cells, read_matrix
from kvtax.axes.page import summary_page, with_releases_of
from kvtax.engine.installation import installation
from kvtax.report import render
from tests.harness.made_up import made

UNLISTED = "0.99.0"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Source release of a vLLM that releases.toml does not have."""
    package = tmp_path / "vllm-next" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text(f"__version__ = version = '{UNLISTED}'\n")
    return package.parent


def test_a_run_that_is_stopped_keeps_its_cells_and_goes_on(
    tree, tmp_path, monkeypatch, capsys
):
    measured_now: list[str] = []

    def measured(name, release, connector, installed, command, noop):
        if name == "nixl_both" and "nixl_both" not in measured_now:
            measured_now.append(name)
            raise KeyboardInterrupt
        measured_now.append(name)
        assert (release, installed.versions["vllm"]) == (UNLISTED, f"{UNLISTED}+cpu")
        return made(name, release)

    monkeypatch.setattr(matrix, "measured", measured)
    monkeypatch.setattr(matrix, "environment_of", lambda _: installation())
    out = tmp_path / "cells"
    names = ["plain", "nixl_both"]
    choice = Choice(connectors=names, vllm=tree, folder=out)
    with pytest.raises(KeyboardInterrupt):
        measure_matrix(read_matrix(), choice, None)
    assert list(read_all_cells(out)) == [(UNLISTED, "plain")]
    assert "1 of 2: vLLM 0.99.0, plain: measured" in capsys.readouterr().out
    measure_matrix(read_matrix(), choice, None)
    assert measured_now == ["plain", "nixl_both", "nixl_both"]
    cells = read_all_cells(out)
    page = render.markdown(summary_page(with_releases_of(read_matrix(), cells), cells))
    assert f"Each axis on {UNLISTED}" in page
