# SPDX-License-Identifier: Apache-2.0
"""What is attached to an issue gives the same answer and names nobody."""

from __future__ import annotations

import tarfile

from kvtax.look.instance_summary import cost
from tests.look.conftest import main, only
from tests.look.made_up_server import served

SECRETS = {
    "host": "host-of-somebody",
    "boot_id": "kernel-of-somebody",
    "label": {"config": "/home/somebody/c.toml", "patches": {"a_patch": "hash-of-it"}},
}


def test_a_bundle_has_the_same_costs_and_names_nobody(tmp_path, capsys):
    server = served(tmp_path / "of-somebody")
    server.header |= SECRETS
    for number, request in enumerate(server.requests):
        request["id"] = f"request-of-somebody-{number}"
    folder = server.write()
    before = cost(only(folder))
    assert main([str(tmp_path), "--bundle", str(tmp_path / "issue.tar.gz")]) == 0
    assert "lines of 1 servers" in capsys.readouterr().out
    with tarfile.open(tmp_path / "issue.tar.gz") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            text = file.read()
            assert b"somebody" not in text and b"hash-of-it" not in text
            path = tmp_path / "bundle" / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    instance = only(tmp_path / "bundle")
    after = cost(instance)
    assert after.step == before.step
    assert after.methods == before.methods
    assert instance.vllm_version == "0.18.1"
    assert instance.requests.height == len(server.requests)
