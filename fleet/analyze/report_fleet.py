# SPDX-License-Identifier: Apache-2.0
"""The report's sections about the instances: cache, balance, interference and so on."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.analyze.frames import TITLES
from lab.records.arm import OUR_PROXY
from lab.stats.markdown import DASH, Document, interval, number, table


def _repeats(document: Document) -> Iterator[tuple[str, Document]]:
    for arm, entry in document["arms"].items():
        many = len(entry["repeats"]) > 1
        for repeat in entry["repeats"]:
            yield f"`{arm}`" + (f" r{repeat['repeat']}" if many else ""), repeat


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def level_text(level: Document | None) -> str:
    """`12.3 [11.9, 12.8]`."""
    if level is None:
        return DASH
    if level["ci95"] is None:
        return number(level["value"])
    return f"{number(level['value'])} [{', '.join(map(number, level['ci95']))}]"


def routers_note(document: Document) -> str:
    """What is not known of arms behind a router that is not ours; empty without any."""
    lines = []
    for arm, entry in document["arms"].items():
        if entry["router"] == OUR_PROXY:
            continue
        placed = any(repeat["imbalance"]["tokens"] for repeat in entry["repeats"])
        served = (
            "which instance served a request is from the instances' own records"
            if placed
            else "which instance served a request is not known, so its balance, its "
            "interference and where its sessions lived are left out, too"
        )
        lines.append(
            f"- `{arm}` ran behind {entry['router']}, which records no decisions: what "
            "it believed to be cached and what other policies would have decided are "
            f"left out; {served}"
        )
    return "\n".join(lines)


def cache_table(document: Document) -> str:
    """APC by instance and overall, and whether counters and usage agree."""
    rows = []
    for label, repeat in _repeats(document):
        overall = repeat["apc"]["overall"]
        parts = ", ".join(
            f"{name} {_share(entry['apc'])}"
            for name, entry in repeat["apc"]["instances"].items()
        )
        agrees = {None: DASH, True: "yes", False: "**no**"}[overall["agrees"]]
        shares = _share(overall["apc_usage"]), _share(overall["apc"])
        held = sorted(set(repeat["kv_blocks"].values()))
        ends = " to ".join(f"{blocks:,}" for blocks in held[:1] + held[1:][-1:])
        rows.append([label, *shares, agrees, parts or DASH, ends or DASH])
    head = ["arm", "APC by usage", "by counters", "agree", "counters by instance"]
    head += ["KV blocks of one"]
    note = (
        "By usage: cached over prompt tokens, as the requests were told. By counters: "
        "hit over queried tokens, as the instances counted. KV blocks: what one "
        "instance has room for beside what its connector takes."
    )
    beliefs = [
        [
            f"`{arm}`",
            entry["cache_state"] or DASH,
            f"{known['n']:,}",
            _share(known["exact"]),
            _share(known["too_high"]),
            _share(known["too_low"]),
            f"{known['mean_error_tokens']:+,.0f}",
            number(known["p99_abs_error_tokens"], 0),
        ]
        for arm, entry in document["arms"].items()
        if (known := entry["belief"])
    ]
    text = table(head, rows) + "\n\n" + note
    if beliefs:
        head = ["arm", "from", "requests", "right", "believed too much", "too little"]
        head += ["mean error, tokens", "p99 of the error's size"]
        text += (
            "\n\nWhat the proxy took to be cached where it sent a request, against "
            "what the server then said (right: within one block):\n\n"
        )
        text += table(head, beliefs)
    return text


def mirror_table(document: Document) -> str:
    """The proxy's mirror against the exact cache state; nothing without the latter."""
    told = [
        (label, mirror, mirror["held_difference_tokens"])
        for label, repeat in _repeats(document)
        if (mirror := repeat["mirror"])
    ]
    rows = [
        [
            label,
            f"{mirror['prompts']:,}",
            number(mirror["mean_difference_tokens"]),
            "not counted" if held is None else f"{held:+,}",
            f"{mirror['gaps']}",
            "yes" if mirror["complete"] else "**no**",
        ]
        for label, mirror, held in told
    ]
    if not rows:
        return ""
    head = ["arm", "prompts", "mean difference, tokens", "held at the end, tokens"]
    head += ["gaps in the events", "events complete"]
    return (
        "What the proxy would have believed without KV events (its mirror), against "
        "what they told: by how much the two disagreed about a prompt, and about all "
        "that was cached after the last request (above 0: the mirror held more):\n\n"
        + table(head, rows)
    )


def gpu_table(document: Document) -> str:
    """How busy the GPUs were; nothing without any."""
    rows = [
        [
            label,
            gpu,
            number(use["utilization_percent"]),
            number(use["memory_used_mib_max"], 0),
            number(use["power_w"], 0),
            f"{use['samples']}",
        ]
        for label, repeat in _repeats(document)
        for gpu, use in (repeat["gpu"] or {}).items()
    ]
    if not rows:
        return ""
    head = ["arm", "GPU", "busy %, mean", "MiB, most", "W, mean", "samples"]
    return "## GPUs\n\n" + table(head, rows)


def balance_table(document: Document) -> str:
    rows = []
    for label, repeat in _repeats(document):
        spot = repeat["hotspot"] or {}
        tokens = repeat["imbalance"]["tokens"]
        rows.append(
            [
                label,
                number(repeat["imbalance"]["max_over_min"], 2),
                number(spot.get("mean"), 2),
                number(spot.get("p99"), 2),
                ", ".join(f"{name} {n / 1e3:,.0f}" for name, n in tokens.items()),
            ]
        )
    head = ["arm", "token imbalance", "hotspot mean", "hotspot p99"]
    note = (
        "Token imbalance: max/min over the instances of prompt and generated tokens "
        "(a dash: one served none). Hotspot index: max/mean of the tokens under way, "
        "over the time of the steady window in which any are; 1 is even."
    )
    return table([*head, "thousand tokens by instance"], rows) + "\n\n" + note


def accumulation_table(document: Document) -> str:
    rows = []
    for label, repeat in _repeats(document):
        lives = repeat["accumulation"]
        if lives is None:
            continue
        sessions, tokens = lives["sessions"].values(), lives["tokens"].values()
        rows.append(
            [
                label,
                f"{max(one['peak'] for one in sessions)}",
                number((lives["sessions_skew"] or {}).get("mean"), 2),
                number(max(one["peak"] for one in tokens) / 1e3, 0),
                number((lives["tokens_skew"] or {}).get("mean"), 2),
            ]
        )
    if not rows:
        return ""
    head = ["arm", "most sessions at one instance", "max/mean over time"]
    head += ["most thousand context tokens at one", "max/mean over time"]
    note = (
        "In the steady window. A session lives where its latest request went, until "
        "its next one or its end."
    )
    return table(head, rows) + "\n\n" + note


def interference_table(document: Document) -> str:
    rows = [
        [
            f"`{arm}`",
            f"{found['n']:,}",
            interval_or_value(found["slope_ms_per_ktoken"]),
            number(found["base_ms"], 2),
        ]
        for arm, entry in document["arms"].items()
        if (found := entry["interference"])
    ]
    if not rows:
        return "Too few requests, or no prefill beside any decode."
    head = ["arm", "requests", "ms of TPOT per 1,000 tokens", "TPOT without, ms"]
    note = (
        "Slope of TPOT over the new tokens that were waiting for a first token at the "
        "same instance while the request decoded (mean over its decode)."
    )
    return table(head, rows) + "\n\n" + note


def interval_or_value(level: Document) -> str:
    return interval(level, 3) if level["ci95"] else f"{level['value']:+.3f}"


def migration_table(document: Document) -> str:
    migration = document["migration"] or {"policies": []}
    rows = [
        [
            "never"
            if (every := one["every_turns"]) is None
            else f"every {every} turns",
            number(one["max_over_min"], 2),
            number((one["hotspot"] or {}).get("mean"), 2),
            f"{one['chances']}",
            f"{one['migrations']}",
            number(one["transfer_ms_total"], 0),
            number(one["transfer_ms_max"], 1),
        ]
        for one in migration["policies"]
        if one["every_turns"] is None or one["chances"]
    ]
    if not rows:
        return "No request to simulate with."
    head = ["sessions move", "token imbalance", "hotspot mean", "chances", "moves"]
    head += ["transfer ms in all", "longest, ms"]
    untried = ", ".join(
        f"{one['every_turns']}"
        for one in migration["policies"]
        if one["every_turns"] is not None and not one["chances"]
    )
    note = f"Not tried: every {untried} turns. No session is so long.\n\n"
    note = (note if untried else "") + (
        f"The requests of `{migration['of']}` on sticky sessions, with the times they "
        f"had; {migration['kv_bytes_per_token']:,} bytes of KV per token "
        f"({migration['model']}) over {migration['bandwidth_gbit_s']:g} Gbit/s."
    )
    return table(head, rows) + "\n\n" + note


def substrate_table(document: Document) -> str:
    if not document["substrate"]:
        return "No two connectors under one policy in this run."
    steps = [step for chain in document["substrate"] for step in chain["steps"]]
    places = {step["layer"]: step["place"] for step in steps}
    layers = sorted(places, key=places.__getitem__)
    rows = [
        [
            f"{TITLES[chain['metric']]} {chain['quantile']}",
            f"{chain['policy']}@{chain['concurrency']}",
            *(_step(by_layer.get(layer)) for layer in layers),
        ]
        for chain in document["substrate"]
        for by_layer in [{step["layer"]: step for step in chain["steps"]}]
    ]
    note = (
        "ms; the first is a level, the others what is added to the one before, with "
        "95 % intervals over sessions and runs."
    )
    return table(["", "policy", *layers], rows) + "\n\n" + note


def _step(step: Document | None) -> str:
    if step is None or step["level"] is None:
        return DASH
    if step["added"] is None:
        return number(step["level"]["value"])
    return interval(step["added"], 2) if step["added"]["ci95"] else DASH


def policies_table(document: Document) -> str:
    """How often another policy would have chosen another instance."""
    entries = {a: e["offline"] for a, e in document["arms"].items() if e["offline"]}
    if not entries:
        return "No recorded decisions with snapshots."
    policies = list(next(iter(entries.values())))
    rows = [
        [f"`{arm}`", *(_other(offline[name]) for name in policies)]
        for arm, offline in entries.items()
    ]
    note = (
        "Share of the arm's recorded snapshots (first repeat) on which the policy of "
        "the column chooses another instance. The policy that ran, in brackets, must "
        "be at 0."
    )
    return table(["arm", *policies], rows) + "\n\n" + note


def _other(entry: Document | None) -> str:
    if entry is None:
        return DASH
    share = _share(entry["other_instance"])
    return f"({share})" if entry["ran"] else share
