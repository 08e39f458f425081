"""Batch files, runs of them that end early, and an engine whose tokens tell every request from every other."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys

from tests.api.fake_engine import FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class SeededEngine(FakeEngine):
    """Each token depends on the seed, the completion's index, the prompt and the position, as real noise does."""

    def next_token(self, request):
        key = request.seed, request.sample_index, request.prompt, len(request.output.token_ids)
        return 97 + hashlib.blake2b(repr(key).encode(), digest_size=1).digest()[0] % 26


def line(custom_id="a", url=COMPLETIONS, **body):
    """One request; a completion of "ab" by 9 tokens, or a chat, unless the body says otherwise."""
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 9} | body
    elif url == COMPLETIONS:
        body = {"prompt": "ab", "max_tokens": 9} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def mixed_lines(count, seed=0):
    """Requests of both kinds and many lengths, some with seeds, some of several choices, some wrong."""
    random_ = random.Random(seed)
    lines = []
    for index in range(count):
        body = {"max_tokens": random_.randint(1, 30), "temperature": 1}
        url = random_.choice([CHAT, COMPLETIONS])
        if url == COMPLETIONS:
            body["prompt"] = random_.choice(["ab", ["a", "b", "c"], [97, 98], f"{index}"])
        if index % 5 == 0:
            body["n"] = random_.randint(1, 3)
        if index % 7 == 0:
            body["seed"] = index
        if index % 11 == 10:
            body["temperature"] = -1
        lines.append(line(f"id-{index}", url, **body))
    lines[count // 2]["custom_id"] = "id-0"
    return lines


def write(path, lines):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def read(path):
    """The objects of a file's lines; a torn or blank one fails."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(part) for part in data.decode().split("\n")[:-1]]


def ids(path):
    """The custom ids of a file's lines."""
    return [entry["custom_id"] for entry in read(path)]


def answers(path):
    """What must be equal between runs: all but the times, and what the prefix cache happened to hold."""
    lines = read(path)
    for entry in lines:
        entry["response"]["body"].pop("created", None)
        entry["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return lines


class Stop(Exception):
    """What `stop_at` raises."""


def stop_at(count):
    """A progress callback that ends a run once `count` lines are written."""

    def progress(done, total):
        if done >= count:
            raise Stop

    return progress


def start(files, *arguments, module="tests.batch.batch_program", **environment):
    """Starts run-batch on an input and an output, as a program over the scripted engine or of `module`."""
    command = [sys.executable, "-m", module, "run-batch", "-i", files[0], "-o", files[1]]
    return subprocess.Popen(
        list(map(str, [*command, *arguments])),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Waits for a program; returns (exit code, stdout, stderr)."""
    out, err = process.communicate()
    return process.returncode, out, err
