# SPDX-License-Identifier: Apache-2.0
"""Spreads squares over a cluster: a line of JSON for each, as soon as it is done.

python -m tests.hosts.spread_squares ADDRESS COUNT SECONDS_EACH
"""

from __future__ import annotations

import io
import json
import sys
import tarfile

from lab.hosts.apart import spread
from lab.hosts.errors import HostsError
from lab.serving.supervise import exit_on_signals


def main() -> int:
    address, count, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    exit_on_signals()
    tasks = [f"{value} {seconds}".encode() for value in range(count)]
    try:
        for index, host, packed in spread(address, "tests.hosts.squares", {}, tasks):
            with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
                square = int(tar.extractfile("./square").read())
            print(json.dumps([index, square, host]), flush=True)
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
