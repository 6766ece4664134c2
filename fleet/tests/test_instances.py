# SPDX-License-Identifier: Apache-2.0
"""Instances files: read as written, by hand or by the launcher, or refused by name."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from kvtax_fleet.instances import (
    InstancesError,
    instances_of_urls,
    read_instances,
    write_instances,
)
from kvtax_fleet.records.instances import Instance

URLS = ["http://10.0.0.1:8000", "http://10.0.0.2:8000/"]
TWO = [
    Instance("10.0.0.1:8000", "http://10.0.0.1:8000"),
    Instance("10.0.0.2:8000", "http://10.0.0.2:8000"),
]
ENGINES = [Instance(f"i{n}", "http://h", data_parallel_rank=n) for n in (0, 1)]
READERS = [
    Instance(
        f"i{n}",
        f"http://h:{n}",
        role="prefill",
        connector="mooncake",
        bootstrap_url=f"http://h:1{n}",
        kv_tokens=1,
    )
    for n in (1, 2)
]


@pytest.mark.parametrize("instances", [TWO, ENGINES, READERS])
def test_an_instances_file_is_read_as_it_was_written(instances, tmp_path):
    write_instances(tmp_path / "instances.json", instances)
    assert read_instances(tmp_path / "instances.json") == instances


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", f"instances = {json.dumps(URLS)}"),
        ("a.toml", "".join(f'[[instances]]\nurl = "{url}"\n' for url in URLS)),
        ("a.json", json.dumps(URLS)),
        ("a.json", json.dumps({"instances": [{"url": url} for url in URLS]})),
        (
            "a.json",
            json.dumps({"schema": "kvtax.instances/1", "instances": URLS}),
        ),
    ],
)
def test_a_list_of_urls_is_an_instances_file(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_instances(tmp_path / name) == TWO


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", "instances = [", ""),
        ("a.toml", f"instance = {json.dumps(URLS)}", "expected"),
        ("a.json", "[]", "empty"),
        ("a.json", '"http://10.0.0.1:8000"', "expected"),
        ("a.json", '["10.0.0.1:8000"]', "no http URL"),
        ("a.json", '[{"name": "a"}]', "url"),
        ("a.json", '[{"url": "http://a:1", "rolle": "both"}]', "rolle"),
        ("a.json", '["http://a:1", "http://a:1"]', "'a:1'"),
        (
            "a.json",
            '[{"name": "a", "url": "http://x"}, {"name": "a", "url": "http://y"}]',
            "name 'a'",
        ),
        (
            "a.json",
            '[{"name": "a", "url": "http://x"}, {"name": "b", "url": "http://x"}]',
            "url 'http://x'",
        ),
        ("a.json", '[{"url": "http://x", "block_tokens": 0}]', "block_tokens"),
        ("a.json", '[{"url": "http://x", "kv_tokens": -5}]', "kv_tokens"),
        ("a.json", '[{"url": "http://x", "data_parallel_rank": -1}]', "rank"),
        ("a.toml", b"\xff", "utf-8"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "recursion"),
    ],
)
def test_a_bad_instances_file_is_refused_by_name_and_reason(
    name, content, reason, tmp_path
):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InstancesError, match=f"{re.escape(str(path))}.*{reason}"):
        read_instances(path)


@pytest.mark.parametrize("ranks", [(None, None), (0, 0), (None, 1)])
def test_engines_of_one_address_have_ranks_of_their_own(ranks, tmp_path):
    alike = [
        msgspec.structs.replace(engine, data_parallel_rank=rank)
        for engine, rank in zip(ENGINES, ranks, strict=True)
    ]
    path = tmp_path / "instances.json"
    with pytest.raises(ValueError, match="a `data_parallel_rank` of its own"):
        write_instances(path, alike)
    path.write_bytes(msgspec.json.encode(alike))
    with pytest.raises(InstancesError, match="a `data_parallel_rank` of its own"):
        read_instances(path)


def test_urls_of_the_command_line_may_have_names():
    named = instances_of_urls(["a=http://10.0.0.1:8000/?x=1", URLS[1]])
    assert named == [Instance("a", "http://10.0.0.1:8000/?x=1"), TWO[1]]
    for bad in (["a=b"], ["a=http://x:1", "a=http://y:1"]):
        with pytest.raises(InstancesError):
            instances_of_urls(bad)


@pytest.mark.parametrize(
    "url",
    ["http://user:pw@h:1", "b=http://user:pw@h:1", "https://pw@h", "http://:pw@h:1"],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(InstancesError, match="user or password") as refusal:
        instances_of_urls([url])
    assert "pw" not in str(refusal.value)
