# SPDX-License-Identifier: Apache-2.0
"""Apply each series to its pristine release and run upstream's tests around it.

    python -m tools.upstream.check [--changed] [VERSION]...

For each release: the source release becomes the base commit of a scratch git
repository and `git am` applies the series. Upstream's tests run before and after; the
series' own tests run after, once more without the series' code, where some of them
must fail, and commit by commit with that commit alone on the release. Reports every
difference by node id, and counts by commit: its own tests, and upstream's tests of the
modules that it changes; --changed runs no others. Exit codes: 0 nothing differs, 1 a
difference or a failure, 2 an unknown release. Logs are in runs/upstream-check/. It
warns of threads that our pages looked up more than 60 days ago.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from kvtax.engine.releases import link_extensions
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import Supervised
from kvtax.report.markdown import table
from kvtax.signals import exit_on_signals
from tools.upstream.model_cache import write_model_cache
from tools.upstream.release import (
    Release,
    Repository,
    UpstreamError,
    install,
    load_releases,
)
from tools.upstream.threads import warnings

LOGS = REPOSITORY / "runs" / "upstream-check"
PLUGIN = Path(__file__).with_name("plugin")
TEST_TIMEOUT_S = 300
RUN_TIMEOUT_S = 7200


# Outcome of each test by its node id; a file that pytest could not import counts as
# one test, with its path as id.
Outcomes = dict[str, str]


def read_outcomes(report: Path) -> Outcomes:
    """Read a file of pytest-reportlog: passed, failed, skipped or error."""
    outcomes: Outcomes = {}
    if not report.exists():
        return outcomes
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        kind, name = entry["$report_type"], entry.get("nodeid")
        outcome = entry.get("outcome")
        if kind == "CollectReport" and outcome == "failed":
            outcomes[name] = "error"
        elif kind == "TestReport" and entry["when"] == "call":
            outcomes[name] = outcome
        elif kind == "TestReport" and outcome != "passed":
            # Before the test or after it; a skip is decided before.
            outcomes[name] = "skipped" if outcome == "skipped" else "error"
    return outcomes


def differences(before: Outcomes, after: Outcomes) -> list[str]:
    """List tests of `before` with another outcome in `after`, a line each."""
    return [
        f"{name}: {outcome} before, {after.get(name, 'gone')} after"
        for name, outcome in sorted(before.items())
        if after.get(name) != outcome
    ]


def counted(outcomes: Outcomes) -> str:
    """Count outcomes: `3 passed, 1 failed`, the most frequent first."""
    counts = Counter(outcomes.values()).most_common()
    return ", ".join(f"{number} {outcome}" for outcome, number in counts) or "no test"


class TestRun:
    """One pytest process over `tests`, which are paths from `root`."""

    def __init__(
        self, name: str, release: Release, root: Path, tests: list[str], home: Path
    ) -> None:
        self.name = name
        self.log = LOGS / release.version / f"{name}.log"
        self.report = self.log.with_suffix(".jsonl")
        link_extensions(release.compiled, root / "vllm", release.version)
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "KVTAX_", "PYTHON", "PYTEST_", "HF_"))
        } | {
            "PYTHONPATH": os.pathsep.join(map(str, (root, PLUGIN))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(root.with_name(f"{name}-cache")),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # Away from this repository, whose own tests/ would be imported as upstream's.
        command = ["env", f"--chdir={root}", str(release.python), "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", "-p", "assume_device_0", "--tb=short"]
        command += ["--continue-on-collection-errors"]
        command += [f"--timeout={TEST_TIMEOUT_S}", f"--report-log={self.report}"]
        self._began_s = time.monotonic()
        self._process = Supervised([*command, *tests], env, self.log)

    def outcomes(self) -> Outcomes:
        """Wait for the tests, print the counts and return the outcomes.

        Raises UpstreamError if pytest itself did not come to an end.
        """
        try:
            status = self._process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UpstreamError(f"pytest still runs: see {self.log}") from None
        # 0 all passed, 1 some failed, 2 some file could not be imported.
        if status not in (0, 1, 2) or not self.report.exists():
            raise UpstreamError(f"pytest ended with {status}: see {self.log}")
        outcomes = read_outcomes(self.report)
        took_s = time.monotonic() - self._began_s
        print(f"  {self.name:<36} {counted(outcomes)}; {took_s:.0f} s", flush=True)
        return outcomes

    def __enter__(self) -> TestRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stop()


def check(release: Release, scratch: Path, changed: bool = False) -> list[str]:
    """Run the tests around a release's series; print counts, return faults.

    With `changed`, run only the tests of what the series changes.
    Raises UpstreamError if the series does not apply or the tests do not run.
    """
    series = release.series
    install(release)
    repository = Repository(release, scratch / "after")
    repository.apply(series)
    commits = repository.git("rev-list", "--reverse", "base..series").split()
    own_tests = [repository.own_tests(commit) for commit in commits]
    before_tests = chosen_tests(release, repository, commits, changed)
    added = sorted(set(repository.changed("tests")) - set(release.tests))
    tests = [*before_tests, *added]
    pristine = repository.worktree("before", "base")
    tests_only = repository.worktree("without-the-code", "base")
    repository.git("-C", str(tests_only), "checkout", "-q", "series", "--", "tests")

    home = scratch / "hf"
    write_model_cache(home)
    shutil.rmtree(LOGS / release.version, ignore_errors=True)
    (LOGS / release.version).mkdir(parents=True)
    with (
        TestRun("before", release, pristine, before_tests, home) as first,
        TestRun("after", release, repository.root, tests, home) as second,
    ):
        before, after = first.outcomes(), second.outcomes()
    # A new file as a whole: pytest finds none of its tests if it cannot be imported.
    all_own = [test for test in chain(*own_tests) if test.split("::")[0] not in added]
    all_own += added
    with TestRun("without-the-code", release, tests_only, all_own, home) as third:
        without = third.outcomes()
    wrong = judge(before, after, without)
    rows = []
    for patch, commit, own in zip(release.sources, commits, own_tests, strict=True):
        beside = repository.tests_of_changed(commit, tests)
        alone = None
        if patch not in release.stacked:
            alone = run_alone(patch, commit, release, repository, home)
            wrong += [
                f"{name}: {outcome}, with {patch} alone"
                for name, outcome in sorted(alone.items())
                if outcome != "passed"
            ]
        rows.append([patch, *counts(own, beside, before, after, without, alone)])
    print(table(COUNTS_HEAD, rows), flush=True)
    return wrong


def chosen_tests(
    release: Release, repository: Repository, commits: Sequence[str], changed: bool
) -> list[str]:
    """List upstream's tests to run: all, or with `changed` those of changed modules."""
    tests = list(release.tests)
    if not changed:
        return tests
    by_commit = [repository.tests_of_changed(commit, tests) for commit in commits]
    return [test for test in tests if any(test in of for of in by_commit)]


def run_alone(
    patch: str, commit: str, release: Release, repository: Repository, home: Path
) -> Outcomes:
    """Run the tests of a commit with that commit alone on the release.

    Raises UpstreamError if it does not apply alone.
    """
    tree = repository.worktree(patch, "base")
    repository.git("-C", str(tree), "cherry-pick", commit)
    with TestRun(patch, release, tree, repository.own_tests(commit), home) as run:
        return run.outcomes()


COUNTS_HEAD = ["commit", "own tests, all commits", "alone", "fail without the code"]
COUNTS_HEAD += ["tests of what it changes, before", "after"]


def counts(
    own: Sequence[str],
    beside: Sequence[str],
    before: Outcomes,
    after: Outcomes,
    without: Outcomes,
    alone: Outcomes | None,
) -> list[str]:
    """Count the outcomes of a commit's own tests, and of the files `beside`.

    Tests of the series are not among the latter. `own` may name whole files.
    """
    added = {
        name: outcome
        for name, outcome in after.items()
        if name not in before
        and (name.partition("[")[0] in own or name.partition("::")[0] in own)
    }
    failed = [name for name in added if without.get(name) != "passed"]
    kept = [name for name in before if name.partition("::")[0] in beside]
    around = [
        counted({name: run[name] for name in kept if name in run})
        for run in (before, after)
    ]
    lonely = "needs those before it" if alone is None else counted(alone)
    return [counted(added), lonely, str(len(failed)), *around]


def judge(before: Outcomes, after: Outcomes, without: Outcomes) -> list[str]:
    """List the faults that the three runs show, a line each.

    The series' own tests are those that only `after` has. All must pass, and some must
    not pass in `without`, where their code is missing: else they prove nothing.
    """
    own = {name: outcome for name, outcome in after.items() if name not in before}
    need_the_code = [name for name in own if without.get(name) != "passed"]
    print(f"  {'own tests':<36} {counted(own)}; {len(need_the_code)} fail without code")
    wrong = differences(before, after)
    wrong += [
        f"{name}: {outcome}, a test of the series"
        for name, outcome in sorted(own.items())
        if outcome != "passed"
    ]
    if not need_the_code:
        wrong.append("no test of the series fails without its code")
    return wrong


def main() -> int:
    """Check the series of the versions named, or all; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--changed", action="store_true")
    arguments = parser.parse_args()
    try:
        releases = load_releases(arguments.versions)
    except UpstreamError as error:
        print(f"upstream check: {error}", file=sys.stderr)
        return error.exit_code
    exit_on_signals()
    for warning in warnings(datetime.date.today()):
        print(f"upstream check: {warning}", flush=True)
    failed = False
    for version, release in releases.items():
        print(f"vLLM {version}: {len(release.sources)} patches", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvtax-upstream-") as scratch:
            try:
                wrong = check(release, Path(scratch), arguments.changed)
            except UpstreamError as error:
                wrong = [str(error)]
        for line in wrong:
            print(f"  WRONG {line}")
        failed |= bool(wrong)
    print("upstream check:", "failed" if failed else "nothing differs")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
