# SPDX-License-Identifier: Apache-2.0
"""A run's folder is never mixed with another run's."""

from __future__ import annotations

import pytest

from kvtax.paths import REPOSITORY
from kvtax.run_folder import RunFolderError, check_resumable, choose, held, read_plan

PLAN = "run.json"
RUN = {
    "plan": ["a", "b"],
    "provenance": {"package_versions": {}, "host": "h", "git_commit": "c"},
}


def test_without_a_folder_each_run_gets_a_new_one():
    chosen = choose(None, "cpu", PLAN, resume=False)
    assert chosen.parent == REPOSITORY / "runs"
    assert chosen.name.endswith("-cpu")
    assert not chosen.exists()


def test_a_folder_with_a_run_is_left_alone_unless_that_run_is_resumed(tmp_path):
    (tmp_path / PLAN).write_text("{}")
    with pytest.raises(RunFolderError, match="--resume, or another --out"):
        choose(tmp_path, "cpu", PLAN, resume=False)
    assert choose(tmp_path, "cpu", PLAN, resume=True) == tmp_path


@pytest.mark.parametrize("given", [True, False])
def test_there_must_be_a_run_to_resume(given, tmp_path):
    with pytest.raises(RunFolderError, match="a run to resume"):
        choose(tmp_path if given else None, "cpu", PLAN, resume=True)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(RunFolderError, match="--out wants a folder"):
        choose(tmp_path / "out", "cpu", PLAN, resume=False)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_plan_is_refused_by_name(content, tmp_path):
    (tmp_path / PLAN).write_text(content)
    with pytest.raises(RunFolderError, match=r"cannot resume .*run\.json"):
        read_plan(tmp_path / PLAN)


def test_a_run_goes_on_as_what_it_was(tmp_path):
    check_resumable(tmp_path, RUN, RUN, ["plan"])


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (RUN | {"plan": ["a"]}, "its plan is another"),
        (RUN | {"provenance": RUN["provenance"] | {"host": "x"}}, "host has changed"),
    ],
)
def test_another_plan_or_machine_is_refused_by_name(now, message, tmp_path):
    with pytest.raises(RunFolderError, match=message):
        check_resumable(tmp_path, RUN, now, ["plan"])


def test_a_plan_of_something_else_is_not_gone_on_with(tmp_path):
    with pytest.raises(RunFolderError, match="its plan is another"):
        check_resumable(tmp_path, {}, RUN, ["plan"])
    with pytest.raises(RunFolderError, match="git_commit has changed"):
        check_resumable(tmp_path, {"plan": RUN["plan"]}, RUN, ["plan"])


def test_a_folder_is_one_command_s_at_a_time(tmp_path):
    with held(tmp_path):
        with held(tmp_path / "other"):
            pass
        with (
            pytest.raises(RunFolderError, match="makes a run there"),
            held(tmp_path),
        ):
            pass
    with held(tmp_path):
        pass
