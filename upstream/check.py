# SPDX-License-Identifier: Apache-2.0
"""Applies each series to its pristine release and runs upstream's tests around it.

    python -m upstream.check [--release VERSION]...

For each release: the source release becomes the base commit of a scratch git
repository and `git am` applies the series. Upstream's tests run before and after; the
series' own tests run after, and once more without the series' code, where some of them
must fail. Reports every difference by node id. Exit codes: 0 nothing differs, 1 a
difference or a failure, 2 wrong usage. Logs are in runs/upstream-check/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.paths import REPOSITORY
from lab.serving.supervise import Supervised, exit_on_signals
from upstream.model_cache import write_model_cache
from upstream.outcomes import Outcomes, counted, differences, read_outcomes
from upstream.release import (
    Release,
    Repository,
    UpstreamError,
    install,
    link_extensions,
    load_releases,
)

LOGS = REPOSITORY / "runs" / "upstream-check"
PLUGIN = Path(__file__).with_name("plugin")
TEST_TIMEOUT_S = 300
RUN_TIMEOUT_S = 3600


class TestRun:
    """One pytest process over `tests`, which are paths from `root`."""

    def __init__(
        self, name: str, release: Release, root: Path, tests: list[str], home: Path
    ) -> None:
        self.name = name
        self.log = LOGS / release.version / f"{name}.log"
        self.report = self.log.with_suffix(".jsonl")
        link_extensions(release, root)
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
        """What became of the tests, once all are done; prints the counts.

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
        print(f"  {self.name:<16} {counted(outcomes)}; {took_s:.0f} s", flush=True)
        return outcomes

    def __enter__(self) -> TestRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.stop()


def check(release: Release, scratch: Path) -> list[str]:
    """What is wrong with a release's series, a line each; prints the counts.

    Raises UpstreamError if the series does not apply or the tests do not run.
    """
    if not release.patches:
        raise UpstreamError(f"no series in patches/upstream/{release.version}")
    install(release)
    repository = Repository(release, scratch / "after")
    repository.apply(release.patches)
    own_files = repository.changed("tests")
    tests = [*release.tests, *(set(own_files) - set(release.tests))]
    pristine = repository.worktree("before", "base")
    tests_only = repository.worktree("without-the-code", "base")
    repository.git("-C", str(tests_only), "checkout", "-q", "series", "--", "tests")

    home = scratch / "hf"
    write_model_cache(home)
    shutil.rmtree(LOGS / release.version, ignore_errors=True)
    (LOGS / release.version).mkdir(parents=True)
    with (
        TestRun("before", release, pristine, list(release.tests), home) as first,
        TestRun("after", release, repository.root, tests, home) as second,
    ):
        before, after = first.outcomes(), second.outcomes()
    with TestRun("without-the-code", release, tests_only, own_files, home) as third:
        without = third.outcomes()
    return judge(before, after, without)


def judge(before: Outcomes, after: Outcomes, without: Outcomes) -> list[str]:
    """What the three runs show to be wrong, a line each.

    The series' own tests are those that only `after` has. All must pass, and some must
    not pass in `without`, where their code is missing: else they prove nothing.
    """
    own = {name: outcome for name, outcome in after.items() if name not in before}
    need_the_code = [name for name in own if without.get(name) != "passed"]
    print(f"  {'own tests':<16} {counted(own)}; {len(need_the_code)} fail without code")
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
    releases = load_releases()
    parser = argparse.ArgumentParser(prog="python -m upstream.check")
    parser.add_argument("--release", action="append", choices=releases)
    versions = parser.parse_args().release or list(releases)
    exit_on_signals()
    failed = False
    for version in versions:
        print(f"vLLM {version}: {len(releases[version].patches)} patches", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvtax-upstream-") as scratch:
            try:
                wrong = check(releases[version], Path(scratch))
            except UpstreamError as error:
                wrong = [str(error)]
        for line in wrong:
            print(f"  WRONG {line}")
        failed |= bool(wrong)
    print("upstream check:", "failed" if failed else "nothing differs")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
